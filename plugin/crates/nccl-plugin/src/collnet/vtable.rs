//! The exported tables, one per version.

use evenkeel_nccl_abi::{
    CollNetV6, CollNetV7, CollNetV8, CollNetV9, CollNetV10, CollNetV11, CollNetV12,
};

use super::calls::{
    close_coll, close_listen, connect, devices, finalize_v11, iallreduce, iflush, init_v6,
    init_v11, listen_v6, reduce_support, test,
};
use super::comm::CollNetContext;
use crate::net::NAME;
use crate::net::connect::listen_v11;
use crate::net::device::{get_properties, make_v_device};
use crate::net::memory::{dereg_mr, reg_mr};

/// A table with the entries that are the same in all versions filled in.
macro_rules! table {
    ($symbol:ident: $table:ident, { $($own:tt)* }) => {
        /// NCCL finds the table by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name is NCCL's")]
        static $symbol: $table = $table {
            name: NAME.as_ptr(),
            devices: Some(devices),
            get_properties: Some(get_properties),
            connect: Some(connect),
            reduce_support: Some(reduce_support),
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: None,
            dereg_mr: Some(dereg_mr),
            iallreduce: Some(iallreduce),
            iflush: Some(iflush),
            test: Some(test),
            close_coll: Some(close_coll),
            close_listen: Some(close_listen),
            $($own)*
        };
    };
}

table!(ncclCollNetPlugin_v6: CollNetV6, { init: Some(init_v6), listen: Some(listen_v6), });

table!(ncclCollNetPlugin_v7: CollNetV7, { init: Some(init_v6), listen: Some(listen_v6), });

table!(ncclCollNetPlugin_v8: CollNetV8, {
    init: Some(init_v6),
    listen: Some(listen_v6),
    iallgather: None,
    ireducescatter: None,
});

table!(ncclCollNetPlugin_v9: CollNetV9, {
    init: Some(init_v6),
    listen: Some(listen_v6),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
});

table!(ncclCollNetPlugin_v10: CollNetV10, {
    init: Some(init_v6),
    listen: Some(listen_v6),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
});

// NCCL counts the devices of both tables before it makes any of several, which both then have. Up to 2.27 it counts those of the
// network too late.
table!(ncclCollNetPlugin_v11: CollNetV11, {
    init: Some(init_v11),
    listen: Some(listen_v11::<CollNetContext>),
    iallgather: None,
    ireducescatter: None,
    make_v_device: Some(make_v_device::<4>),
    finalize: Some(finalize_v11),
});

table!(ncclCollNetPlugin_v12: CollNetV12, {
    init: Some(init_v11),
    listen: Some(listen_v11::<CollNetContext>),
    iallgather: None,
    ireducescatter: None,
    make_v_device: Some(make_v_device::<8>),
    finalize: Some(finalize_v11),
});
