#!/bin/bash
# The guest's first process: prepares the machine, runs the command, reports its exit status and switches the machine off.
# It sends lines to the lab: "ready", then "exit STATUS"; or "failed REASON".
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
lab=/run/lab

# udev creates these names on other systems.
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
mkdir -p /dev/virtio-ports
for port in /sys/class/virtio-ports/*; do
	ln -sf "/dev/${port##*/}" "/dev/virtio-ports/$(<"$port/name")"
done

switch_off() {
	sync
	echo o > /proc/sysrq-trigger
	sleep 60
}

if ! bash -eux $lab/prepare.sh > $lab/log 2>&1; then
	tail -n 30 $lab/log > /dev/console
	echo "failed $(tail -n 2 $lab/log | tr '\n' ' ')" > /dev/virtio-ports/status
	switch_off
fi

# Through pipes, because a port can be opened once only, and programs open /dev/stdout.
exec 4> >(exec cat > /dev/virtio-ports/stdout)
stdout=$!
exec 5> >(exec cat > /dev/virtio-ports/stderr)
stderr=$!
exec 6> /dev/virtio-ports/status
echo ready >&6
ulimit -l unlimited -n 65536 -c 0
bash $lab/command.sh < /dev/null >&4 2>&5 4>&- 5>&- 6>&-
status=$?
exec 4>&- 5>&-
# Background processes of the command may keep the pipes open; they are killed after a while.
(
	sleep 5
	kill $stdout $stderr
) 2> /dev/null 6>&- &
wait $stdout $stderr
cd /
umount "$(<$lab/share)"
echo "exit $status" >&6
switch_off
