//! The exported tables, one per version.

use evenkeel_nccl_abi::{NetV6, NetV7, NetV8, NetV9, NetV10, NetV11, NetV12};

use super::NAME;
use super::connect::{
    accept_v6, accept_v7, close_listen, close_recv, close_send, connect_v6, connect_v7,
    connect_v10, connect_v11, listen_v6, listen_v11,
};
use super::context::Context;
use super::device::{devices, get_properties, make_v_device};
use super::init::{finalize_v11, finalize_v12, init_v6, init_v10, init_v11, set_net_attr};
use super::memory::{dereg_mr, reg_mr, reg_mr_dma_buf};
use super::request::{iflush, irecv_v6, irecv_v10, isend_v6, isend_v10, test};

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
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: Some(reg_mr_dma_buf),
            dereg_mr: Some(dereg_mr),
            iflush: Some(iflush),
            test: Some(test),
            close_send: Some(close_send),
            close_recv: Some(close_recv),
            close_listen: Some(close_listen),
            $($own)*
        };
    };
}

table!(ncclNetPlugin_v6: NetV6, {
    init: Some(init_v6),
    listen: Some(listen_v6),
    connect: Some(connect_v6),
    accept: Some(accept_v6),
    isend: Some(isend_v6),
    irecv: Some(irecv_v6),
});

/// v7 to v9 differ in properties and in the types of sizes.
macro_rules! table_v7 {
    ($symbol:ident: $table:ident, { $($own:tt)* }) => {
        table!($symbol: $table, {
            init: Some(init_v6),
            listen: Some(listen_v6),
            connect: Some(connect_v7),
            accept: Some(accept_v7),
            isend: Some(isend_v6),
            irecv: Some(irecv_v6),
            get_device_mr: None,
            irecv_consumed: None,
            $($own)*
        });
    };
}

table_v7!(ncclNetPlugin_v7: NetV7, {});
table_v7!(ncclNetPlugin_v8: NetV8, {});
table_v7!(ncclNetPlugin_v9: NetV9, { make_v_device: Some(make_v_device::<4>), });

table!(ncclNetPlugin_v10: NetV10, {
    init: Some(init_v10),
    listen: Some(listen_v6),
    connect: Some(connect_v10),
    accept: Some(accept_v7),
    isend: Some(isend_v10),
    irecv: Some(irecv_v10),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: Some(make_v_device::<4>),
});

/// v11 and v12 differ in properties, in the number of devices that can be one, and in how NCCL ends contexts.
macro_rules! table_v11 {
    ($symbol:ident: $table:ident, $members:literal, $finalize:ident) => {
        table!($symbol: $table, {
            init: Some(init_v11),
            listen: Some(listen_v11::<Context>),
            connect: Some(connect_v11),
            accept: Some(accept_v7),
            isend: Some(isend_v10),
            irecv: Some(irecv_v10),
            get_device_mr: None,
            irecv_consumed: None,
            make_v_device: Some(make_v_device::<$members>),
            finalize: Some($finalize),
            set_net_attr: Some(set_net_attr),
        });
    };
}

table_v11!(ncclNetPlugin_v11: NetV11, 4, finalize_v11);
table_v11!(ncclNetPlugin_v12: NetV12, 8, finalize_v12);
