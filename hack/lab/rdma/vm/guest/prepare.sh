#!/bin/bash
# Sets up the shared folder, the modules and the network of the topology. Run with -eux: the first failure stops it, and
# the trace shows the command.
lab=/run/lab
share=$(<$lab/share)
kernel=$(<$lab/kernel)
topology=$(<$lab/topology)

hostname rdmalab
ip link set lo up
mkdir -p /lib/modules "$share"
mount --bind "$kernel/lib/modules" /lib/modules
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap share "$share"
modprobe -a veth tls rdma_rxe rdma_ucm ib_uverbs ib_umad

# The first device of each link is even, the second one odd.
case $topology in
rails) links="0 1" ;;
*) links=0 ;;
esac
for link in $links; do
	ip link add eth$((2 * link)) type veth peer name eth$((2 * link + 1))
done
case $topology in
pair | rails)
	# Traffic between two addresses of one machine must pass the link between their interfaces, and not lo. Packets that
	# come in by an interface are looked up in "local"; packets sent here are looked up in table 77 first.
	echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
	for link in $links; do
		for end in 0 1; do
			n=$((2 * link + end)) other=$((2 * link + 1 - end))
			own=10.77.$link.$((end + 1)) theirs=10.77.$link.$((2 - end))
			ip link set eth$n mtu 9000 up
			settings=/proc/sys/net/ipv4/conf/eth$n
			echo 1 > $settings/accept_local
			echo 0 > $settings/rp_filter
			echo 1 > $settings/arp_ignore
			echo 2 > $settings/arp_announce
			ip address add "$own/32" dev eth$n
			ip rule add pref 10 iif eth$n lookup local
			ip route add "$theirs/32" dev eth$n src "$own" table 77
			# Traffic of an address to itself stays local.
			ip rule add pref 15 from "$own" to "$own" lookup local
			ip neighbour add "$theirs" lladdr "$(</sys/class/net/eth$other/address)" dev eth$n
		done
		# There is no route from one link to the other.
		ip rule add pref 17 from "10.77.$link.0/24" to 10.77.$((1 - link)).0/24 unreachable
	done
	ip rule add pref 20 lookup 77
	ip rule add pref 30 lookup local
	ip rule del pref 0
	for link in $links; do
		for n in $((2 * link)) $((2 * link + 1)); do rdma link add rxe$n type rxe netdev eth$n; done
	done
	;;
hosts)
	# Devices are visible in every namespace (mode "shared"), as soft-RoCE's cannot be moved in "exclusive" mode.
	# Each sends and receives in the namespace of its interface.
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

for link in $links; do for n in $((2 * link)) $((2 * link + 1)); do
	for ((i = 0; i < 100; i++)); do
		if grep -q ACTIVE /sys/class/infiniband/rxe$n/ports/1/state; then break; fi
		sleep 0.1
	done
	grep ACTIVE /sys/class/infiniband/rxe$n/ports/1/state
done; done
