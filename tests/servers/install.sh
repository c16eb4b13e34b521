#!/bin/sh
# The servers the tests need, and a browser for the console: installed where that may be done, else said loudly.
# Never in the way of what is asked for: without them those tests are skipped (or, with CI set, fail and say why).
#
# Nothing is started: the tests run servers of their own, in temporary folders.
set -u

# Debian keeps PostgreSQL's programs out of PATH, and /usr/sbin out of a plain user's.
PATH="$PATH:/usr/sbin:/usr/local/sbin"

installed() { # installed PROGRAM [FOLDER...]
    command -v "$1" >/dev/null && return
    program=$1; shift
    for folder; do [ -x "$folder/$program" ] && return; done
    return 1
}

missing=
installed initdb /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin ||
    missing="$missing postgresql"
installed mariadb-install-db && { installed mariadbd || installed mysqld; } || missing="$missing mariadb-server"
installed pgbouncer || missing="$missing pgbouncer"
installed chromium || installed chromium-browser || installed google-chrome || missing="$missing chromium fonts-dejavu-core"
[ -z "$missing" ] && exit 0

say_missing() {
    echo "!!" >&2
    echo "!! Missing:$missing. Tests on real servers or in a browser are skipped without it, and fail where CI is set." >&2
    echo "!! $1" >&2
    echo "!!" >&2
}

if ! command -v apt-get >/dev/null; then
    say_missing "Install it with your system's packages (macOS: brew install postgresql mariadb)."
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    say_missing "Install it: sudo apt-get install -y --no-install-recommends$missing"
    exit 0
fi

# Packages ask this program whether they may start their service; 101 is no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
fi
echo "Installing$missing for the tests"
log=$(mktemp)
# shellcheck disable=SC2086  # two packages are two words
if { apt-get update && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends $missing; } </dev/null >"$log" 2>&1; then
    rm -f "$log"
else
    tail -n 5 "$log" >&2
    say_missing "apt-get failed; all it said is in $log"
fi
