#!/bin/sh
# Boot a systemd of our own on this machine's file system, network and users, in namespaces: it ends with this process.
# usage: systemd_machine.sh HOME CGROUP USER UID     HOME/units/*: units of the system; rig.target is what is started
#
# In its mount namespace /etc is an overlay, and /run, /var/log and /var/lib/systemd are empty: nothing is left behind.
# The machine's own default target is never booted, only rig.target.
set -eu
home=$1 cgroup=$2 user=$3 uid=$4

if [ -z "${inside:-}" ]; then
    # A control group of its own, so that what systemd makes there can be found and removed afterwards.
    mkdir -p "$home/cgroup" "$home/etc"
    mount --make-rprivate /
    mount -t cgroup2 cgroup2 "$home/cgroup"
    mkdir "$home/cgroup/$cgroup"
    echo $$ >"$home/cgroup/$cgroup/cgroup.procs"
    exec env inside=yes unshare --mount --pid --fork --kill-child --cgroup --ipc --uts sh "$0" "$@"
fi

umount "$home/cgroup"
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs "$home/etc"
mkdir "$home/etc/upper" "$home/etc/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$home/etc/upper,workdir=$home/etc/work" /etc
for directory in /run /var/log /var/lib/systemd; do mount -t tmpfs tmpfs $directory; done
# With this, journald keeps a journal for each user, as a machine with a persistent journal does.
mkdir -p /var/log/journal /run/systemd/journal /run/sshd
touch /run/systemd/journal/flushed

cp "$home/units/"* /etc/systemd/system/
useradd --no-create-home --home-dir "$home/user" --shell /bin/sh --uid "$uid" "$user"
usermod --password '*' "$user" # without this sshd takes the account for locked
hostname rig
exec env -i container=unshare PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=rig.target --log-target=console
