#!/bin/sh
# SPDX-License-Identifier: MIT
#
#   two_hosts.sh [--rate MBIT] RANKS PROGRAM [ARGUMENTS...]
#
# Runs a program through mpirun with RANKS ranks on each of two hosts of its own: network namespaces
# with names and addresses of their own and nothing but a link between them, of MBIT megabit/s in
# each direction if that is said, so that MPI and the control plane go over TCP. Needs root and
# iproute2; ends with 77 (skipped) where there are none.
set -eu

rate=
if [ "${1:-}" = --rate ]; then
    rate=$2
    shift 2
fi
if [ $# -lt 2 ]; then
    sed -n '4s/^# *//p' "$0" >&2
    exit 2
fi
ranks=$1
shift

# Names within what an interface's may have.
a=bel$$a
b=bel$$b
clean_up() {
    ip netns delete "$a" 2>/dev/null || :
    ip netns delete "$b" 2>/dev/null || :
    [ -z "${agent:-}" ] || rm -f "$agent"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
make_host() { # NAME ADDRESS
    ip -n "$1" link set lo up && ip -n "$1" link set "$1" up &&
        ip -n "$1" address add "10.203.7.$2/24" dev "$1"
}
# What earlier runs had no time to remove.
for old in $(ip netns list 2>/dev/null | sed -n 's/^bel\([0-9]*\)[ab]\( .*\)\{0,1\}$/\1/p'); do
    [ -d "/proc/$old" ] || ip netns delete "bel${old}a" 2>/dev/null || :
    [ -d "/proc/$old" ] || ip netns delete "bel${old}b" 2>/dev/null || :
done
if [ "$(id -u)" -ne 0 ] || ! unshare --uts true || ! ip netns add "$a" || ! ip netns add "$b" ||
    ! ip link add "$a" netns "$a" type veth peer name "$b" netns "$b" ||
    ! make_host "$a" 1 || ! make_host "$b" 2; then
    echo "two_hosts: skipped: network namespaces need root, iproute2 and a kernel that has them"
    exit 77
fi
for host in "$a" "$b"; do
    [ -z "$rate" ] ||
        tc -n "$host" qdisc add dev "$host" root tbf rate "${rate}mbit" burst 256kb latency 100ms
done

# What mpirun uses in place of ssh: agent HOST COMMAND...
agent=$(mktemp)
cat >"$agent" <<END
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c "hostname $b; exec sh -c '\$*'"
END
chmod +x "$agent"

export OMPI_MCA_plm_rsh_agent="$agent" PRTE_MCA_plm_ssh_agent="$agent"
for layer in OMPI_MCA_oob_tcp OMPI_MCA_btl_tcp PRTE_MCA_oob_tcp; do
    export "${layer}_if_include=10.203.7.0/24"
done
# In the background, so that a signal is heard while it runs.
ip netns exec "$a" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$a" \
    mpirun --host "10.203.7.1:$ranks,10.203.7.2:$ranks" -n "$((2 * ranks))" "$@" </dev/null &
job=$!
trap 'kill "$job"; exit 130' INT TERM
wait "$job"
