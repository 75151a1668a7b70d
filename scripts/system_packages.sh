#!/bin/sh
# Install the few system programs that the tests and the demo run, where they are missing and we may; else say which.
set -eu

missing= wanted=
have() { PATH="$PATH:/usr/sbin:/sbin:/lib/systemd" command -v "$1" >/dev/null 2>&1; }
need() { have "$1" || missing="$missing $2"; } # need PROGRAM PACKAGE
want() { have "$1" || wanted="$wanted $2"; }   # tests that lack it are skipped, and say so

need sshd openssh-server
need ssh openssh-client
need git git
need patch patch
need mkfs.ext4 e2fsprogs
python3.11 -c 'import ensurepip' 2>/dev/null || python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
want systemd systemd
want dbus-daemon dbus
want sudo sudo
want runsv runit

[ -n "$missing$wanted" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    [ -z "$wanted" ] || echo "some tests will be skipped without:$wanted" >&2
    [ -n "$missing" ] || exit 0
    echo "error: these are needed and not here:$missing; install them (apt-get install$missing) and run again" >&2
    exit 1
fi
echo "installing:$missing$wanted" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Debian would start a packaged sshd on port 22; the tests start their own on loopback ports.
[ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d; ours=yes; }
install() { apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
[ -z "$missing" ] || install $missing || status=$?
for package in $wanted; do install "$package" || echo "$package cannot be installed: some tests will be skipped" >&2; done
[ -z "${ours:-}" ] || rm /usr/sbin/policy-rc.d
exit "${status:-0}"
