//! Messages between two comms of one process.

use std::collections::VecDeque;
use std::ffi::{CStr, c_int};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;

use evenkeel_nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, MAX_NET_SIZE, NcclResult, NetV6, NetV7, NetV8,
    NetV9, NetV11, NetV12, PTR_CUDA, PTR_HOST, PropertiesV12, REMOTE_ERROR, SUCCESS,
};

use crate::harness::{Net, Opaque, VERSIONS, in_rdma_lab, log_lines, pattern, until};

#[test]
fn every_version_moves_messages_of_any_size() {
    for version in VERSIONS {
        let mut net = Net::init(version, 0x100).unwrap();
        assert!(net.devices() >= 1);
        let (send, recv) = net.pair();
        for (seed, size) in
            [0, 1, 127, 128, 129, 4096, 16_384, 131_072, 131_200, 1 << 20, 5_000_001]
                .into_iter()
                .enumerate()
        {
            let sent = pattern(seed, size);
            // The posted buffer is longer, as NCCL's slots are; its end must stay as it was.
            let mut received = vec![0xee; size + 64];
            // SAFETY: both buffers live until the requests are finished.
            let (out, back) = unsafe {
                let back = net.irecv(recv, received.as_mut_ptr(), received.len());
                (net.isend(send, sent.as_ptr(), size), back)
            };
            assert_eq!(net.finish(back.unwrap().unwrap()), Ok(size), "v{version}");
            assert_eq!(net.finish(out.unwrap().unwrap()), Ok(size), "v{version}");
            assert!(received[..size] == sent, "v{version}: {size} bytes differ");
            assert!(received[size..].iter().all(|byte| *byte == 0xee));
        }
        net.close_send(send);
        net.close_recv(recv);
        net.finalize();
    }
}

#[test]
fn all_requests_progress_while_only_the_oldest_is_tested() {
    const REQUESTS: usize = 32;
    const SIZE: usize = 200_000;
    let net = Net::init(12, 0x101).unwrap();
    let (send, recv) = net.pair();
    for round in 0..3 {
        let sent: Vec<Vec<u8>> =
            (0..REQUESTS).map(|index| pattern(round * REQUESTS + index, SIZE + index)).collect();
        let mut received = vec![vec![0; SIZE + REQUESTS]; REQUESTS];
        let mut sends = Vec::new();
        let mut recvs = Vec::new();
        for data in &sent {
            // SAFETY: the buffers live until all requests are finished.
            let request = unsafe { net.isend(send, data.as_ptr(), data.len()) }.unwrap();
            sends.push(request.expect("32 requests may be in flight"));
        }
        for buffer in &mut received {
            // SAFETY: as above.
            let request = unsafe { net.irecv(recv, buffer.as_mut_ptr(), buffer.len()) }.unwrap();
            recvs.push(request.expect("32 requests may be in flight"));
        }
        // The sender's requests are not tested at all before everything has arrived.
        for (index, request) in recvs.into_iter().enumerate() {
            assert_eq!(net.finish(request), Ok(SIZE + index));
            assert!(received[index][..SIZE + index] == sent[index], "message {index} differs");
        }
        for (index, request) in sends.into_iter().enumerate() {
            assert_eq!(net.finish(request), Ok(SIZE + index));
        }
    }
    net.close_send(send);
    net.close_recv(recv);
}

/// Messages of random sizes, sent and posted in random turns, up to 32 in flight on either side.
#[test]
fn random_traffic_arrives_whole_and_in_order() {
    const MESSAGES: usize = 400;
    let net = Net::init(12, 0x106).unwrap();
    let (send, recv) = net.pair();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut choose = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % below
    };
    let sizes: Vec<usize> = (0..MESSAGES)
        .map(|_| match choose(4) {
            0 => choose(2),
            1 => choose(2000),
            2 => choose(40_000),
            _ => choose(700_000),
        })
        .collect();
    let sent: Vec<Vec<u8>> =
        sizes.iter().enumerate().map(|(index, size)| pattern(index, *size)).collect();
    let mut received: Vec<Vec<u8>> =
        sizes.iter().map(|size| vec![0xee; size + choose(100)]).collect();
    let (mut sends, mut recvs) = (VecDeque::new(), VecDeque::new());
    let (mut to_send, mut to_post, mut done) = (0, 0, 0);
    until("all messages", || {
        for _ in 0..choose(8) {
            if to_send < MESSAGES {
                let data = &sent[to_send];
                // SAFETY: the data outlives the comms.
                let request = unsafe { net.isend(send, data.as_ptr(), data.len()) }.unwrap();
                if let Some(request) = request {
                    sends.push_back(request);
                    to_send += 1;
                }
            }
        }
        for _ in 0..choose(8) {
            if to_post < MESSAGES {
                let data = &mut received[to_post];
                // SAFETY: the data outlives the comms and is read when its request is finished.
                let request = unsafe { net.irecv(recv, data.as_mut_ptr(), data.len()) }.unwrap();
                if let Some(request) = request {
                    recvs.push_back(request);
                    to_post += 1;
                }
            }
        }
        if sends.front().is_some_and(|request| net.test(*request).unwrap().is_some()) {
            sends.pop_front();
        }
        while let Some(size) = recvs.front().and_then(|request| net.test(*request).unwrap()) {
            recvs.pop_front();
            assert_eq!(size, sizes[done]);
            assert!(received[done][..size] == sent[done], "message {done} differs");
            assert!(received[done][size..].iter().all(|byte| *byte == 0xee));
            done += 1;
        }
        (done == MESSAGES && sends.is_empty()).then_some(())
    })
    .expect("all messages arrive");
    net.close_send(send);
    net.close_recv(recv);
}

/// As NCCL's proxies do: each sender of a host is a tag, and tries again until it is its turn; the receiver posts one buffer
/// for each of those whose messages it wants, in whatever order, and gets all in one request.
#[test]
fn groups_receive_the_messages_of_their_tags_in_every_version() {
    const STEPS: usize = 6;
    for version in VERSIONS {
        let mut net = Net::init(version, 0x107).unwrap();
        let (send, recv) = net.pair();
        let size = |tag: c_int, step: usize| tag as usize * 30_000 + step * 7;
        let sent: Vec<Vec<Vec<u8>>> = (0..8)
            .map(|tag| (0..STEPS).map(|step| pattern(step * 8, size(tag, step))).collect())
            .collect();
        // The first steps of all, of one half, and of the other half.
        let wanted: Vec<Vec<c_int>> = (0..STEPS)
            .flat_map(|step| match step % 3 {
                0 => vec![vec![5, 3, 0, 7, 1, 6, 2, 4]],
                1 => vec![vec![6], (0..6).collect(), vec![7]],
                _ => vec![vec![7, 5, 3, 1], vec![0, 2, 4, 6]],
            })
            .collect();
        let (mut posted, mut done) = (VecDeque::new(), [0; 8]);
        let (mut to_post, mut to_send) = (wanted.iter(), [0; 8]);
        let mut sends: Vec<Opaque> = Vec::new();
        until("all groups", || {
            for tag in 0..8 {
                let Some(data) = sent[tag].get(to_send[tag]) else { continue };
                let (start, size, tag) = (data.as_ptr(), data.len(), tag as c_int);
                // SAFETY: the data outlives the comms.
                let request = unsafe { net.isend_tagged(send, start, size, tag) }.unwrap();
                if let Some(request) = request {
                    sends.push(request);
                    to_send[tag as usize] += 1;
                }
            }
            sends.retain(|request| net.test(*request).unwrap().is_none());
            if posted.len() < 3
                && let Some(tags) = to_post.next()
            {
                let mut buffers = vec![vec![0xee; 220_000]; tags.len()];
                let group: Vec<_> = buffers
                    .iter_mut()
                    .zip(tags)
                    .map(|(buffer, tag)| (buffer.as_mut_ptr(), buffer.len(), *tag))
                    .collect();
                // SAFETY: the buffers live until the request is finished.
                let request = unsafe { net.irecv_group(recv, &group) }.unwrap();
                posted.push_back((request.expect("room for a group"), tags, buffers));
            }
            if let Some((request, tags, buffers)) = posted.front()
                && let Some(sizes) = net.test_group(*request).unwrap()
            {
                assert_eq!(sizes.len(), tags.len(), "v{version}");
                for ((tag, buffer), size) in tags.iter().zip(buffers).zip(sizes) {
                    let expected = &sent[*tag as usize][done[*tag as usize]];
                    assert_eq!(size, expected.len(), "v{version}, tag {tag}");
                    assert!(buffer[..size] == **expected, "v{version}, tag {tag}: bytes differ");
                    assert!(buffer[size..].iter().all(|byte| *byte == 0xee));
                    done[*tag as usize] += 1;
                }
                posted.pop_front();
            }
            (done == [STEPS; 8] && sends.is_empty()).then_some(())
        })
        .expect("all groups arrive");
        net.close_send(send);
        net.close_recv(recv);
        net.finalize();
    }
}

#[test]
fn more_requests_than_allowed_are_put_off() {
    let net = Net::init(12, 0x102).unwrap();
    let (send, recv) = net.pair();
    let mut byte = [0u8; 33];
    let mut posted = Vec::new();
    for place in &mut byte[..32] {
        // SAFETY: the bytes live until the requests are finished.
        let request = unsafe { net.irecv(recv, place, 1) }.unwrap();
        posted.push(request.expect("32 requests may be in flight"));
    }
    // SAFETY: as above.
    assert_eq!(unsafe { net.irecv(recv, &mut byte[32], 1) }, Ok(None));
    for (index, request) in posted.into_iter().enumerate() {
        let value = [index as u8];
        // SAFETY: the value lives until the request is finished.
        let out = unsafe { net.isend(send, value.as_ptr(), 1) }.unwrap().unwrap();
        net.finish(out).unwrap();
        assert_eq!(net.finish(request), Ok(1));
        assert_eq!(byte[index], index as u8);
    }
    net.close_send(send);
    net.close_recv(recv);
}

#[test]
fn flows_share_a_large_message() {
    let net = Net::init(12, 0xf10e).unwrap();
    let (send, recv) = net.pair();
    const SIZE: usize = 32 << 20;
    let sent = pattern(1, SIZE);
    let mut received = vec![0; SIZE];
    // SAFETY: both buffers live until the requests are finished.
    let (out, back) = unsafe {
        let out = net.isend(send, sent.as_ptr(), SIZE).unwrap().unwrap();
        (out, net.irecv(recv, received.as_mut_ptr(), SIZE).unwrap().unwrap())
    };
    assert_eq!(net.finish(back), Ok(SIZE));
    assert_eq!(net.finish(out), Ok(SIZE));
    assert!(received == sent);
    net.close_send(send);
    net.close_recv(recv);
    let lines = log_lines("comm=0xf10e");
    let closed: Vec<_> =
        lines.iter().filter(|line| line.text.contains("connection closed")).collect();
    assert_eq!(closed.len(), 2, "{lines:?}");
    assert!(closed[0].text.contains(&format!("sent={SIZE}B recv=0B")), "{closed:?}");
    assert!(closed[1].text.contains(&format!("sent=0B recv={SIZE}B")), "{closed:?}");
    // More than four where other paths were tried meanwhile; those may have come too late.
    let shares = closed[0].text.split(['[', ']']).nth(1).unwrap();
    let working = shares.split(", ").filter(|bytes| bytes.parse::<u64>().unwrap() > 0).count();
    assert!(working >= 3, "{closed:?}");
}

#[test]
fn too_long_a_message_is_an_error_on_both_sides() {
    let net = Net::init(12, 0x7007).unwrap();
    let (send, recv) = net.pair();
    let sent = pattern(0, 1000);
    let mut received = vec![0xee; 1000];
    // SAFETY: both buffers live until the comms are closed.
    let (_, back) = unsafe {
        let out = net.isend(send, sent.as_ptr(), 1000).unwrap().unwrap();
        (out, net.irecv(recv, received.as_mut_ptr(), 999).unwrap().unwrap())
    };
    assert_eq!(net.finish(back), Err(INVALID_USAGE));
    assert!(received.iter().all(|byte| *byte == 0xee), "nothing may be written");
    // The sender's bytes were taken by the kernel; its next message fails.
    let failed = until("the sender's error", || {
        // SAFETY: as above.
        match unsafe { net.isend(send, sent.as_ptr(), 10) } {
            Ok(Some(request)) => net.finish(request).err(),
            Ok(None) => None,
            Err(error) => Some(error),
        }
    });
    assert_eq!(failed, Some(REMOTE_ERROR));
    net.close_send(send);
    net.close_recv(recv);
    let lines = log_lines("comm=0x7007");
    let warnings: Vec<_> = lines.iter().filter(|line| line.level == 2).collect();
    assert_eq!(warnings.len(), 2, "one line per side: {warnings:?}");
    assert!(warnings[0].text.contains("1000 bytes") && warnings[0].text.contains("999"));
}

#[test]
fn what_nccl_must_not_do_is_an_error_and_no_crash() {
    let net = Net::init(12, 0x103).unwrap();
    let (send, recv) = net.pair();
    let table = net.table::<NetV12>();
    let (mut done, null) = (0, ptr::null_mut());
    let mut request = ptr::null_mut();
    let mut size = 1;
    let mut byte = 0u8;
    let mut data = ptr::from_mut(&mut byte).cast();
    // SAFETY: the arguments that are not null are valid; null is what is tried.
    unsafe {
        let test = table.test.unwrap();
        assert_eq!(test(null, &mut done, ptr::null_mut()), INVALID_ARGUMENT);
        let listen = table.listen.unwrap();
        assert_eq!(listen(null, 0, null, &mut request), INVALID_ARGUMENT);
        let isend = table.isend.unwrap();
        assert_eq!(isend(null, data, 1, 0, null, null, &mut request), INVALID_ARGUMENT);
        assert_eq!(isend(send.0, null, 1, 0, null, null, &mut request), INVALID_ARGUMENT);
        let too_long = (1 << 30) + 1;
        assert_eq!(isend(send.0, data, too_long, 0, null, null, &mut request), INVALID_ARGUMENT);
        let irecv = table.irecv.unwrap();
        let (mut tag, mut mh, mut ph) = (0, null, null);
        assert_eq!(
            irecv(recv.0, 9, &mut data, &mut size, &mut tag, &mut mh, &mut ph, &mut request),
            INTERNAL_ERROR
        );
        assert_eq!(
            irecv(recv.0, 1, &mut data, &mut size, ptr::null_mut(), &mut mh, &mut ph, &mut request),
            INVALID_ARGUMENT
        );
        let iflush = table.iflush.unwrap();
        let mut int = 1;
        assert_eq!(iflush(recv.0, 1, &mut data, &mut int, &mut mh, &mut request), INVALID_ARGUMENT);
        assert_eq!(iflush(recv.0, 9, &mut data, &mut int, &mut mh, &mut request), INTERNAL_ERROR);
        int = 0;
        assert_eq!(iflush(recv.0, 1, &mut data, &mut int, &mut mh, &mut request), SUCCESS);
        assert!(request.is_null(), "nothing has come");
        let reg_mr = table.reg_mr.unwrap();
        assert_eq!(reg_mr(send.0, data, 1, PTR_HOST, &mut mh), SUCCESS);
        assert_eq!((table.dereg_mr.unwrap())(send.0, mh), SUCCESS);
        assert_eq!(reg_mr(send.0, data, 1, PTR_CUDA, &mut mh), INVALID_ARGUMENT);
        assert_eq!(reg_mr(send.0, data, 1, 3, &mut mh), INTERNAL_ERROR);
        let reg_mr_dma_buf = table.reg_mr_dma_buf.unwrap();
        let none = fs::File::open("/dev/zero").unwrap();
        for descriptor in [-1, none.as_raw_fd()] {
            let code = reg_mr_dma_buf(recv.0, data, 1, PTR_CUDA, 0, descriptor, &mut mh);
            assert_eq!((code, mh), (INVALID_ARGUMENT, null));
        }
        let mut properties = MaybeUninit::<PropertiesV12>::uninit();
        let get_properties = table.get_properties.unwrap();
        assert_eq!(get_properties(-1, properties.as_mut_ptr()), INVALID_ARGUMENT);
        assert_eq!(get_properties(9999, properties.as_mut_ptr()), INVALID_ARGUMENT);
    }
    // The connection still works.
    // SAFETY: the byte lives until the requests are finished.
    let (out, back) = unsafe {
        (net.isend(send, ptr::null(), 0).unwrap().unwrap(), net.irecv(recv, &mut byte, 1))
    };
    assert_eq!(net.finish(back.unwrap().unwrap()), Ok(0));
    assert_eq!(net.finish(out), Ok(0));
    net.close_send(send);
    net.close_recv(recv);
}

/// Checks the fields that a version's properties have.
macro_rules! check_properties {
    ($net:expr, $table:ty, $($field:ident == $value:expr),* $(,)?) => {{
        let mut properties = MaybeUninit::uninit();
        let get = $net.table::<$table>().get_properties.unwrap();
        // SAFETY: a place for the properties is passed, and they are used only if written.
        let properties = unsafe {
            assert_eq!(get(0, properties.as_mut_ptr()), SUCCESS);
            properties.assume_init()
        };
        // SAFETY: the name ends in a zero byte.
        let name = unsafe { CStr::from_ptr(properties.name) };
        assert_eq!(name, if in_rdma_lab() { c"rxe0:1" } else { c"lo" });
        assert_eq!(properties.port, in_rdma_lab().into());
        assert!(properties.pci_path.is_null());
        // That of a card, where there is one; else the device's number.
        assert_eq!(properties.guid != 0, in_rdma_lab());
        assert!(properties.speed > 0);
        assert_eq!((properties.ptr_support, properties.max_recvs), (PTR_HOST, 8));
        assert!(properties.max_comms > 1000);
        $(assert_eq!(properties.$field, $value, stringify!($field));)*
        properties
    }};
}

#[test]
fn properties_are_right_for_every_version() {
    let net = |version| Net::init(version, 0x104).unwrap();
    let in_range = |bytes| assert!(bytes > 0 && bytes <= MAX_NET_SIZE);
    let global = in_rdma_lab().into();
    check_properties!(net(6), NetV6,);
    check_properties!(net(7), NetV7, net_device_type == 0, net_device_version == 0);
    check_properties!(net(8), NetV8, reg_is_global == global, net_device_type == 0);
    let v9 = check_properties!(net(9), NetV9, reg_is_global == global, force_flush == 0);
    assert_eq!((v9.v_props.count, v9.v_props.devices[0]), (1, 0));
    in_range(v9.max_p2p_bytes);
    in_range(v9.max_coll_bytes);
    let v11 = check_properties!(net(11), NetV11, max_multi_request_size == 1);
    in_range(v11.max_p2p_bytes);
    let v12 = check_properties!(
        net(12),
        NetV12,
        max_multi_request_size == 1,
        // As the environment says.
        rail_id == 3,
        plane_id == -1,
    );
    assert_eq!((v12.v_props.count, v12.v_props.devices[0]), (1, 0));
    in_range(v12.max_p2p_bytes);
    in_range(v12.max_coll_bytes);
}

#[test]
fn every_table_is_named() {
    for version in VERSIONS {
        let net = Net::init(version, 0x105).unwrap();
        assert_eq!(net.name(), c"Evenkeel");
    }
}

#[test]
fn negative_sizes_are_refused() {
    let net = Net::init(8, 0).unwrap();
    let (send, recv): (Opaque, Opaque) = net.pair();
    let mut request = ptr::null_mut();
    let isend = net.table::<NetV8>().isend.unwrap();
    let size: c_int = -1;
    // SAFETY: the call must not touch the data.
    let result: NcclResult = unsafe {
        isend(send.0, ptr::dangling_mut::<u8>().cast(), size, 0, ptr::null_mut(), &mut request)
    };
    assert_eq!(result, INVALID_ARGUMENT);
    net.close_send(send);
    net.close_recv(recv);
}
