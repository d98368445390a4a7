#!/bin/sh
# Installs a CPython on Ubuntu: TPU VMs have 22.04, whose own is 3.10. make calls it with GET_PYTHON=1, also where only
# the library is missing.
#
#     sh tpu/get_python.sh python3.11               as root, or with sudo that asks for no password; /usr/bin/python3.11: too
#     sh tpu/get_python.sh python3.11 --packages    only says which packages that takes
set -eu
name=${1#/usr/bin/}
case "$name" in
python3.11 | python3.12 | python3.13) ;;
*) echo "error: $1 cannot be installed; give make PYTHON=python3.11, python3.12 or python3.13, or none" >&2 && exit 2 ;;
esac

# Ubuntu, Debian and deadsnakes split CPython in the same way: the interpreter, what `python3.11 -m venv` needs, and the
# library that torch_xla is linked to, which their interpreter does without.
packages="$name $name-venv lib$name"
if [ "${2-}" = --packages ]; then
	echo "$packages"
	exit
fi

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# A machine that has just been made updates itself, and apt has one user at a time.
patiently() { for _ in 1 2 3 4 5; do "$@" && return; sleep "${PAUSE:-30}"; done; "$@"; }

# The interpreter that is there, if any, is of the packages that apt knows; one that was built by hand need not be.
is_known() { "$1" -c '' 2> /dev/null && patiently root apt-get update -q && apt-cache show "lib$name" > /dev/null 2>&1; }

if ! is_known "$1"; then
	# A container or a minimal host has no program for archives.
	if ! command -v add-apt-repository > /dev/null; then
		patiently root apt-get update -q
		patiently root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get install -y software-properties-common
	fi
	patiently root add-apt-repository -y ppa:deadsnakes/ppa
fi
# needrestart would restart services afterwards, and the run that waits for this is one.
patiently root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get install -y $packages
