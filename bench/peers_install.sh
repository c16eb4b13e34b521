#!/bin/sh
# The servers that `python -m bench peers` compares Postroom with, and Spark's Kafka connector, which `bench spark`
# compares it with: installed where that may be done, else said.
# Never in the way of the rest of the benchmark: a peer that is not here is shown as such in the table.
#
# Nothing is started: the benchmark runs servers of its own, in temporary folders. NATS and the clients come
# with the extra `bench`.
set -u

poms=$(dirname "$0")/peers
cache=${XDG_CACHE_HOME:-$HOME/.cache}/postroom-bench
kafka=${POSTROOM_BENCH_KAFKA:-$cache/kafka}
connector=${POSTROOM_BENCH_SPARK_KAFKA:-$cache/spark-kafka}
PATH="$PATH:/usr/sbin:/usr/local/sbin"

say() { echo "!! $1" >&2; }

is_here() { [ "$1" -nt "$poms/$2" ]; }

jars_are_here() { is_here "$kafka" kafka-pom.xml && is_here "$connector" spark-kafka-pom.xml; }

wanted() { # The Debian packages of the programs that are not here
    command -v redis-server >/dev/null || printf ' redis-server'
    command -v rabbitmq-server >/dev/null || printf ' rabbitmq-server'
    jars_are_here || command -v mvn >/dev/null || printf ' maven' # brings a Java too
}

install_packages() {
    missing=$(wanted)
    [ -z "$missing" ] && return
    if ! command -v apt-get >/dev/null; then
        say "Missing peers:$missing. Install them with your system's packages."
        return
    fi
    if [ "$(id -u)" != 0 ]; then
        say "Missing peers. Install them: sudo apt-get install -y --no-install-recommends$missing"
        return
    fi
    # Packages ask this program whether they may start their service; 101 is no.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        trap 'exit 130' INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    fi
    echo "Installing$missing for the benchmark"
    log=$(mktemp)
    # shellcheck disable=SC2086  # two packages are two words
    if { apt-get update && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $missing; } </dev/null >"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 5 "$log" >&2
        say "apt-get failed; all it said is in $log"
    fi
}

install_jars() { # $1: what they are, $2: the folder, $3: the pom that names them; complete, or not there at all
    is_here "$2" "$3" && return
    if ! command -v mvn >/dev/null || ! command -v timeout >/dev/null; then
        say "$1 is left out: it needs Maven (mvn) to be fetched."
        return
    fi
    echo "Fetching $1 for the benchmark"
    mkdir -p "$(dirname "$2")"
    part=$(mktemp -d "$2.XXXXXX") log=$(mktemp)
    if timeout 300 mvn -q -B -f "$poms/$3" dependency:copy-dependencies \
        -DoutputDirectory="$part" </dev/null >"$log" 2>&1 &&
        chmod 755 "$part" && rm -rf "$2" && mv "$part" "$2"; then
        rm -f "$log"
    else
        rm -rf "$part"
        tail -n 5 "$log" >&2
        say "$1 is left out: Maven failed; all it said is in $log"
    fi
}

install_packages
install_jars "Kafka" "$kafka" kafka-pom.xml
install_jars "Spark's Kafka connector" "$connector" spark-kafka-pom.xml
