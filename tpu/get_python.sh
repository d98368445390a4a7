#!/bin/sh
# Installs a CPython on Ubuntu: TPU VMs have 22.04, whose own is 3.10. make calls it with GET_PYTHON=1.
#
#     sh tpu/get_python.sh python3.11        as root, or with sudo that asks for no password
set -eu
case "$1" in
python3.11 | python3.12 | python3.13) ;;
*) echo "error: $1 cannot be installed; give make PYTHON=python3.11, python3.12 or python3.13, or none" >&2 && exit 2 ;;
esac

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# A machine that has just been made updates itself, and apt has one user at a time.
patiently() { for _ in 1 2 3 4 5; do "$@" && return; sleep "${PAUSE:-30}"; done; "$@"; }

if command -v "$1" > /dev/null; then
	patiently root apt-get update -q
else
	patiently root add-apt-repository -y ppa:deadsnakes/ppa
fi
patiently root env DEBIAN_FRONTEND=noninteractive apt-get install -y "$1" "$1-venv"
