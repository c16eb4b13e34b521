#!/bin/sh
# MySQL's server from Debian's unstable release, into a folder of its own: install_mysql.sh FOLDER
#
# Debian's stable releases have MariaDB instead. The server brings the libraries it needs, in FOLDER/root, and is
# started by FOLDER/mysqld, as any other program; nothing of the system is replaced.
set -eu
folder=$(readlink -m "${1:?usage: install_mysql.sh FOLDER}")
[ -x "$folder/mysqld" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "MySQL's server is made from Debian's packages, as root. Or name one that you have: POSTROOM_MYSQLD=/usr/sbin/mysqld" >&2
    exit 1
fi
command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
rm -rf "$folder" && mkdir -p "$folder"
echo "Fetching MySQL and its libraries (about 3 minutes)"
debootstrap --variant=minbase --include=mysql-server-core sid "$folder/root" "$mirror" >"$folder/log" 2>&1 || {
    tail -n 5 "$folder/log" >&2
    exit 1
}
cat >"$folder/mysqld" <<'END'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
exec "$root/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/$(uname -m)-linux-gnu" "$root/usr/sbin/mysqld" "$@" \
    --basedir="$root/usr" --lc-messages-dir="$root/usr/share/mysql"
END
chmod 755 "$folder/mysqld"
"$folder/mysqld" --no-defaults --version
