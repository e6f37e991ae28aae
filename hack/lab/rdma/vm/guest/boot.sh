#!/bin/busybox sh
# The initramfs's init: mounts this machine's file system as the root, read-only, with an overlay for the guest's writes.
# shellcheck shell=dash
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
exec > /dev/console 2>&1

stop() {
	echo "boot: $1"
	$b poweroff -f
	$b sleep 60
}

for module in /modules/*; do
	$b insmod "$module" || stop "insmod $module"
done
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /below || stop "mount the root"
$b mount -t tmpfs tmpfs /above
$b mkdir /above/upper /above/work
$b mount -t overlay -o lowerdir=/below,upperdir=/above/upper,workdir=/above/work overlay /new || stop "mount the overlay"
for d in proc sys dev; do
	$b mount --move /$d /new/$d
done
$b mount -t tmpfs tmpfs /new/run
$b mkdir -p /new/run/lab /new/run/netns /new/dev/shm /new/dev/pts
$b cp /lab/* /new/run/lab/
$b mount -t tmpfs tmpfs /new/dev/shm
$b mount -t devpts devpts /new/dev/pts
exec $b switch_root /new /bin/bash /run/lab/main.sh
