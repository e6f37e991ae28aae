#!/bin/bash
# Makes the shared folder, the modules and the network of the topology. Run with -eux: the first failure ends it, and
# the trace says at which command.
lab=/run/lab
share=$(<$lab/share)
kernel=$(<$lab/kernel)
topology=$(<$lab/topology)

hostname rdmalab
ip link set lo up
mkdir -p /lib/modules "$share"
mount --bind "$kernel/lib/modules" /lib/modules
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap share "$share"
modprobe -a veth rdma_rxe rdma_ucm ib_uverbs ib_umad

ip link add eth0 type veth peer name eth1
case $topology in
pair)
	# Two addresses of one machine talk over the wire between its interfaces, not over lo: what comes in by an
	# interface is looked up in "local"; what is made here meets table 77 before "local".
	for i in eth0 eth1; do
		ip link set $i mtu 9000 up
		settings=/proc/sys/net/ipv4/conf/$i
		echo 1 > $settings/accept_local
		echo 0 > $settings/rp_filter
		echo 1 > $settings/arp_ignore
		echo 2 > $settings/arp_announce
	done
	echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
	ip address add 10.77.0.1/32 dev eth0
	ip address add 10.77.0.2/32 dev eth1
	ip rule add pref 10 iif eth0 lookup local
	ip rule add pref 11 iif eth1 lookup local
	ip route add 10.77.0.2/32 dev eth0 src 10.77.0.1 table 77
	ip route add 10.77.0.1/32 dev eth1 src 10.77.0.2 table 77
	# The answers to what an address sends to itself stay local.
	ip rule add pref 15 from 10.77.0.1 to 10.77.0.1 lookup local
	ip rule add pref 16 from 10.77.0.2 to 10.77.0.2 lookup local
	ip rule add pref 20 lookup 77
	ip rule add pref 30 lookup local
	ip rule del pref 0
	ip neighbour add 10.77.0.2 lladdr "$(</sys/class/net/eth1/address)" dev eth0
	ip neighbour add 10.77.0.1 lladdr "$(</sys/class/net/eth0/address)" dev eth1
	rdma link add rxe0 type rxe netdev eth0
	rdma link add rxe1 type rxe netdev eth1
	;;
hosts)
	# Devices are seen from every namespace (mode "shared"): in "exclusive" mode soft-RoCE's cannot be moved to one.
	# Each does its traffic in the namespace of its interface.
	for n in 0 1; do
		host=h$((n + 1))
		ip netns add $host
		ip link set eth$n netns $host
		ip -n $host link set lo up
		ip -n $host link set eth$n mtu 9000 up
		ip -n $host address add 10.77.0.$((n + 1))/24 dev eth$n
		ip netns exec $host rdma link add rxe$n type rxe netdev eth$n
	done
	;;
esac

for n in 0 1; do
	for ((i = 0; i < 100; i++)); do
		if grep -q ACTIVE /sys/class/infiniband/rxe$n/ports/1/state; then break; fi
		sleep 0.1
	done
	grep ACTIVE /sys/class/infiniband/rxe$n/ports/1/state
done
