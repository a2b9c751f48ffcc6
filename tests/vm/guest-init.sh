#!/bin/busybox sh
# shellcheck shell=dash
#
# PID 1 of the guest: mounts the host's file system, runs one command, writes its exit code and powers off.
#
# The launcher shares three directories by 9p: `control` (the command and its exit code), `hostroot`
# (the host's /, read-only, with writes going to a tmpfs overlay) and `output` (writable on both sides).
# Messages of this script go to the serial console, the command's output to /dev/hvc0.

/bin/busybox --install -s /bin

give_up() {
  echo "guest-init: $*" >&2
  poweroff -f
}

mount_9p() { # TAG DIRECTORY OPTIONS
  mount -t 9p -o "trans=virtio,version=9p2000.L,msize=1048576,$3" "$1" "$2" ||
    give_up "cannot mount $1"
}

load_modules() {
  while read -r module; do
    insmod "/modules/$module" || give_up "cannot load $module"
  done < /modules/load-order
}

mount_host_root() {
  # cache=loose allows shared libraries to be mapped. The host's files do not change during a test.
  mount_9p hostroot /host ro,cache=loose
  mount -t tmpfs -o size=60% tmpfs /overlay
  mkdir /overlay/upper /overlay/work
  mount -t overlay -o lowerdir=/host,upperdir=/overlay/upper,workdir=/overlay/work overlay /newroot ||
    give_up "cannot mount an overlay over the host's file system"
  for tree in proc sys dev; do
    mount --move "/$tree" "/newroot/$tree"
  done
  mkdir -p /newroot/dev/pts /newroot/dev/shm
  mount -t devpts devpts /newroot/dev/pts
  mount -t tmpfs tmpfs /newroot/dev/shm
  mount -t tmpfs tmpfs /newroot/run
  mount -t cgroup2 cgroup2 /newroot/sys/fs/cgroup
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
load_modules
mount_9p control /control cache=none
mode=$(cat /control/mode)
output_dir=$(cat /control/output-dir)

case $mode in
  cxl*) guest-cxl || give_up "the CXL device did not become a NUMA node" ;;
esac

mount_host_root
mkdir -p "/newroot$output_dir"
mount_9p output "/newroot$output_dir" cache=none
cp /control/command /newroot/run/penstock-vm-command
ip link set lo up
hostname penstock-vm

# Raw mode: a cooked terminal would turn every newline into two characters.
stty -F /newroot/dev/hvc0 raw -echo
: > /control/begun
chroot /newroot /bin/sh /run/penstock-vm-command \
  < /newroot/dev/null > /newroot/dev/hvc0 2>&1
echo $? > /control/exit-code
sync
poweroff -f
