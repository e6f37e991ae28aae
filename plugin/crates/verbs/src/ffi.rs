//! The part of rdma-core's `libibverbs.so.1` that is used here: its structures as in
//! `infiniband/verbs.h` on LP64, and its functions. Posting and polling are not exported functions.
//! The header calls them through a table in the device's context, and so does this crate.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::Error;

/// `struct ibv_context`, up to what is used.
#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    pub(crate) ops: ContextOps,
    cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
}

/// `struct ibv_context_ops`: the entries that are used, and padding for the others.
#[repr(C)]
pub(crate) struct ContextOps {
    before_poll_cq: [*mut c_void; 11],
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    between: [*mut c_void; 12],
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    after_post_recv: [*mut c_void; 5],
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct Channel {
    context: *mut Context,
    pub(crate) fd: c_int,
    refcnt: c_int,
}

/// `struct ibv_cq`, up to what is used.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
}

/// `struct ibv_qp`, up to what is used.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut c_void,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub(crate) qp_num: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut c_void,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_ah_attr`, with the `struct ibv_global_route` that it begins with. A GID is two
/// 64-bit words for alignment.
#[repr(C)]
#[derive(Default)]
pub(crate) struct AhAttr {
    pub(crate) dgid: [u64; 2],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) route_end: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// `struct ibv_send_wr`: the fields of RDMA reads and writes, and padding for the rest.
#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    /// In network order.
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) rest: [u64; 9],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// In network order.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    src_qp: u32,
    wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// `struct ibv_async_event`. The element is a pointer or, for a port, its number.
#[repr(C)]
pub(crate) struct AsyncEvent {
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_uint,
}

pub(crate) const FORK_UNNEEDED: c_int = 2;
pub(crate) const PORT_ACTIVE: c_uint = 4;
pub(crate) const LINK_ETHERNET: u8 = 2;
pub(crate) const PORT_GRH_REQUIRED: u8 = 1;
pub(crate) const QPT_RC: c_uint = 2;
pub(crate) const QPS_INIT: c_uint = 1;
pub(crate) const QPS_RTR: c_uint = 2;
pub(crate) const QPS_RTS: c_uint = 3;
pub(crate) const QPS_ERR: c_uint = 6;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(crate) const WR_RDMA_READ: c_uint = 4;
pub(crate) const SEND_SIGNALED: c_uint = 1 << 1;
pub(crate) const SEND_INLINE: c_uint = 1 << 3;
pub(crate) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub(crate) const ACCESS_REMOTE_READ: c_uint = 1 << 2;
pub(crate) const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
pub(crate) const WC_WR_FLUSH_ERR: c_uint = 5;
pub(crate) const EVENT_CQ_ERR: c_uint = 0;
pub(crate) const EVENT_QP_FATAL: c_uint = 1;
pub(crate) const EVENT_QP_REQ_ERR: c_uint = 2;
pub(crate) const EVENT_QP_ACCESS_ERR: c_uint = 3;
pub(crate) const EVENT_DEVICE_FATAL: c_uint = 8;
pub(crate) const EVENT_PORT_ACTIVE: c_uint = 9;
pub(crate) const EVENT_PORT_ERR: c_uint = 10;

/// The attributes that are set with each state of a queue pair (`enum ibv_qp_attr_mask`).
pub(crate) mod mask {
    use std::ffi::c_int;

    pub(crate) const STATE: c_int = 1;
    const ACCESS_FLAGS: c_int = 1 << 3;
    const PKEY_INDEX: c_int = 1 << 4;
    const PORT: c_int = 1 << 5;
    const AV: c_int = 1 << 7;
    const PATH_MTU: c_int = 1 << 8;
    const TIMEOUT: c_int = 1 << 9;
    const RETRY_CNT: c_int = 1 << 10;
    const RNR_RETRY: c_int = 1 << 11;
    const RQ_PSN: c_int = 1 << 12;
    const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    const MIN_RNR_TIMER: c_int = 1 << 15;
    const SQ_PSN: c_int = 1 << 16;
    const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    const DEST_QPN: c_int = 1 << 20;

    pub(crate) const INIT: c_int = STATE | PKEY_INDEX | PORT | ACCESS_FLAGS;
    pub(crate) const RTR: c_int =
        STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
    pub(crate) const RTS: c_int =
        STATE | TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC;
}

/// Declares the functions that are used, and looks them up.
macro_rules! functions {
    (
        required { $($name:ident: fn($($argument:ty),*) -> $result:ty;)* }
        optional { $($optional:ident: fn($($optional_argument:ty),*) -> $optional_result:ty;)* }
    ) => {
        /// The library's functions. Those that were added later may be missing.
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(crate) $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> $optional_result>,)*
        }

        #[cfg(test)]
        const REQUIRED: &[&str] = &[$(stringify!($name)),*];

        impl Functions {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols are functions with these arguments in every library of this
                // name (.so.1); the library is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("ibv_", stringify!($name), "\0").as_bytes())?,)*
                        $($optional: library
                            .get(concat!("ibv_", stringify!($optional), "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                    })
                }
            }
        }
    };
}

functions! {
    required {
        get_device_list: fn(*mut c_int) -> *mut *mut c_void;
        free_device_list: fn(*mut *mut c_void) -> ();
        get_device_name: fn(*mut c_void) -> *const c_char;
        open_device: fn(*mut c_void) -> *mut Context;
        close_device: fn(*mut Context) -> c_int;
        get_async_event: fn(*mut Context, *mut AsyncEvent) -> c_int;
        ack_async_event: fn(*mut AsyncEvent) -> ();
        query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
        alloc_pd: fn(*mut Context) -> *mut c_void;
        dealloc_pd: fn(*mut c_void) -> c_int;
        reg_mr: fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr;
        dereg_mr: fn(*mut Mr) -> c_int;
        create_comp_channel: fn(*mut Context) -> *mut Channel;
        destroy_comp_channel: fn(*mut Channel) -> c_int;
        create_cq: fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
        destroy_cq: fn(*mut Cq) -> c_int;
        get_cq_event: fn(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        ack_cq_events: fn(*mut Cq, c_uint) -> ();
        create_qp: fn(*mut c_void, *mut QpInitAttr) -> *mut Qp;
        modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
        destroy_qp: fn(*mut Qp) -> c_int;
        wc_status_str: fn(c_uint) -> *const c_char;
    }
    optional {
        reg_mr_iova2: fn(*mut c_void, *mut c_void, usize, u64, c_uint) -> *mut Mr;
        reg_dmabuf_mr: fn(*mut c_void, u64, usize, u64, c_int, c_int) -> *mut Mr;
        fork_init: fn() -> c_int;
        is_fork_initialized: fn() -> c_int;
    }
}

/// The library, once it is loaded.
struct Loaded {
    functions: Functions,
    /// What `ibv_fork_init` returned: 0 or an error number. 0 also where it is not needed.
    fork_init: c_int,
}

/// The library, loaded once in a process. Nothing that finds devices or registers memory is called
/// before `ibv_fork_init`; only `ibv_is_fork_initialized` is, which asks the kernel.
fn loaded() -> Result<&'static Loaded, Error> {
    static LOADED: OnceLock<Result<Loaded, String>> = OnceLock::new();
    let load = || {
        // SAFETY: loading rdma-core's library only sets up its own data.
        let library = unsafe { Library::new("libibverbs.so.1") }.map_err(|e| e.to_string())?;
        let functions = Functions::find(&library).map_err(|error| error.to_string());
        // Its providers keep pointers into it, so it is never unloaded.
        std::mem::forget(library);
        let functions = functions?;
        // SAFETY: it has no arguments, and only asks the kernel.
        let status = functions.is_fork_initialized.map(|status| unsafe { status() });
        let fork_init = match (status, functions.fork_init) {
            // To call it would still withhold pages from children.
            (Some(FORK_UNNEEDED), _) => 0,
            // SAFETY: it has no arguments, and may be called several times in a process.
            (_, Some(init)) => unsafe { init() },
            (_, None) => libc::ENOSYS,
        };
        Ok(Loaded { functions, fork_init })
    };
    LOADED.get_or_init(load).as_ref().map_err(|why| Error::NoLibrary(why.clone()))
}

/// The library's functions.
pub(crate) fn functions() -> Result<&'static Functions, Error> {
    Ok(&loaded()?.functions)
}

/// Whether the process may fork while devices use its memory.
///
/// Before Linux 5.12, a fork makes all private pages copy-on-write. The parent's next write to such
/// a page gets a new page, and the device goes on with the old one. `ibv_fork_init` makes rdma-core
/// withhold the registered pages from children (`MADV_DONTFORK`). Newer kernels copy the pages for
/// the children instead, so there it is not called.
///
/// # Errors
/// When the library is missing, or memory was registered before by somebody else in this process
/// (`EINVAL`).
pub fn fork_protection() -> Result<(), Error> {
    match loaded()?.fork_init {
        0 => Ok(()),
        code => Err(Error::code("ibv_fork_init", code)),
    }
}

/// Layouts of rdma-core's header as compiled by C; a test below compares them where the header is
/// installed. A size of 0 means that the structure's end is not transcribed.
macro_rules! layout {
    ($($of:ident $c_name:literal $size:literal { $($field:ident $offset:literal),* })*) => {
        $(
            $(const _: () = assert!(std::mem::offset_of!($of, $field) == $offset);)*
            const _: () = assert!($size == 0 || size_of::<$of>() == $size);
        )*
        #[cfg(test)]
        const FIELDS: &[(&str, &str, usize)] =
            &[$($(($c_name, stringify!($field), $offset),)*)*];
        #[cfg(test)]
        const SIZES: &[(&str, usize)] = &[$(($c_name, $size),)*];
    };
}

#[cfg(target_pointer_width = "64")]
layout! {
    Context "ibv_context" 0 { ops 8, cmd_fd 264, async_fd 268, num_comp_vectors 272 }
    ContextOps "ibv_context_ops" 256 { poll_cq 88, req_notify_cq 96, post_send 200, post_recv 208 }
    Channel "ibv_comp_channel" 16 { fd 8 }
    Cq "ibv_cq" 0 { context 0 }
    Qp "ibv_qp" 0 { context 0, qp_num 52 }
    Mr "ibv_mr" 48 { lkey 36, rkey 40 }
    PortAttr "ibv_port_attr" 52 { state 0, active_mtu 8, pkey_tbl_len 32, lid 34, active_width 43, active_speed 44, link_layer 46, flags 47 }
    QpInitAttr "ibv_qp_init_attr" 64 { cap 32, qp_type 52, sq_sig_all 56 }
    AhAttr "ibv_ah_attr" 32 { dgid 0, flow_label 16, sgid_index 20, hop_limit 21, traffic_class 22, dlid 24, sl 26, is_global 29, port_num 30 }
    QpAttr "ibv_qp_attr" 144 { path_mtu 8, rq_psn 20, sq_psn 24, dest_qp_num 28, qp_access_flags 32, ah_attr 56, pkey_index 120, max_rd_atomic 126, max_dest_rd_atomic 127, min_rnr_timer 128, port_num 129, timeout 130, retry_cnt 131, rnr_retry 132 }
    Sge "ibv_sge" 16 { length 8, lkey 12 }
    SendWr "ibv_send_wr" 128 { sg_list 16, num_sge 24, opcode 28, send_flags 32, imm_data 36, remote_addr 40, rkey 48 }
    RecvWr "ibv_recv_wr" 32 { sg_list 16, num_sge 24 }
    Wc "ibv_wc" 48 { status 8, opcode 12, vendor_err 16, byte_len 20, imm_data 24, qp_num 28 }
    AsyncEvent "ibv_async_event" 16 { event_type 8 }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::fmt::Write as _;
    use std::path::Path;
    use std::process::Command;
    use std::{env, fs, process};

    use super::*;

    const VALUES: &[(&str, u32)] = &[
        ("IBV_FORK_UNNEEDED", FORK_UNNEEDED as u32),
        ("IBV_PORT_ACTIVE", PORT_ACTIVE),
        ("IBV_LINK_LAYER_ETHERNET", LINK_ETHERNET as u32),
        ("IBV_QPF_GRH_REQUIRED", PORT_GRH_REQUIRED as u32),
        ("IBV_QPT_RC", QPT_RC),
        ("IBV_QPS_INIT", QPS_INIT),
        ("IBV_QPS_RTR", QPS_RTR),
        ("IBV_QPS_RTS", QPS_RTS),
        ("IBV_QPS_ERR", QPS_ERR),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
        ("IBV_WR_RDMA_READ", WR_RDMA_READ),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED),
        ("IBV_SEND_INLINE", SEND_INLINE),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ),
        ("IBV_ACCESS_RELAXED_ORDERING", ACCESS_RELAXED_ORDERING),
        ("IBV_WC_WR_FLUSH_ERR", WC_WR_FLUSH_ERR),
        ("IBV_EVENT_CQ_ERR", EVENT_CQ_ERR),
        ("IBV_EVENT_QP_FATAL", EVENT_QP_FATAL),
        ("IBV_EVENT_QP_REQ_ERR", EVENT_QP_REQ_ERR),
        ("IBV_EVENT_QP_ACCESS_ERR", EVENT_QP_ACCESS_ERR),
        ("IBV_EVENT_DEVICE_FATAL", EVENT_DEVICE_FATAL),
        ("IBV_EVENT_PORT_ACTIVE", EVENT_PORT_ACTIVE),
        ("IBV_EVENT_PORT_ERR", EVENT_PORT_ERR),
        ("IBV_QP_STATE|IBV_QP_PKEY_INDEX|IBV_QP_PORT|IBV_QP_ACCESS_FLAGS", mask::INIT as u32),
        (
            "IBV_QP_STATE|IBV_QP_AV|IBV_QP_PATH_MTU|IBV_QP_DEST_QPN|IBV_QP_RQ_PSN|IBV_QP_MAX_DEST_RD_ATOMIC|IBV_QP_MIN_RNR_TIMER",
            mask::RTR as u32,
        ),
        (
            "IBV_QP_STATE|IBV_QP_TIMEOUT|IBV_QP_RETRY_CNT|IBV_QP_RNR_RETRY|IBV_QP_SQ_PSN|IBV_QP_MAX_QP_RD_ATOMIC",
            mask::RTS as u32,
        ),
    ];

    /// The path of a field that is nested in C.
    fn in_c(structure: &str, field: &str) -> String {
        match (structure, field) {
            ("ibv_send_wr", "remote_addr" | "rkey") => format!("wr.rdma.{field}"),
            (
                "ibv_ah_attr",
                "dgid" | "flow_label" | "sgid_index" | "hop_limit" | "traffic_class",
            ) => format!("grh.{field}"),
            _ => field.to_owned(),
        }
    }

    /// The library reports whether registered memory is protected; older ones do not.
    #[test]
    fn fork_protection_is_on_once_the_library_is_loaded() {
        const DISABLED: c_int = 0;
        if let Err(error) = crate::devices() {
            eprintln!("skipped: {error}");
            return;
        }
        fork_protection().unwrap();
        if let Some(status) = functions().unwrap().is_fork_initialized {
            // SAFETY: it has no arguments.
            assert_ne!(unsafe { status() }, DISABLED);
        }
    }

    /// A library in the place of rdma-core's. It notes its calls. Its kernel is as old as the
    /// environment says.
    fn write_stub_library(folder: &Path) {
        let mut source = r#"
            #include <stdlib.h>
            #include <string.h>
            char calls[4096];
            static void note(const char *name) { strcat(strcat(calls, name), " "); }
            static int number(const char *name) { note(name); return atoi(getenv(name)); }
            int ibv_is_fork_initialized(void) { return number("is_fork_initialized"); }
            int ibv_fork_init(void) { return number("fork_init"); }
        "#
        .to_owned();
        for name in REQUIRED {
            writeln!(source, "void *ibv_{name}(void) {{ note(\"{name}\"); return 0; }}").unwrap();
        }
        fs::write(folder.join("stub.c"), source).unwrap();
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o", "libibverbs.so.1", "stub.c"])
            .current_dir(folder)
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }

    /// What the kernel and the library say about forks, and the calls and the error that follow.
    #[test]
    fn fork_init_is_called_first_on_old_kernels_only() {
        let folder = env::temp_dir().join(format!("evenkeel-verbs-fork-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        write_stub_library(&folder);
        let (old, new) = ("0", "2");
        let refused = libc::EINVAL.to_string();
        for (kernel, fork_init, calls, error) in [
            (old, "0", "is_fork_initialized fork_init get_device_list ", ""),
            (old, &*refused, "is_fork_initialized fork_init get_device_list ", "ibv_fork_init"),
            (new, &*refused, "is_fork_initialized get_device_list ", ""),
        ] {
            let output = Command::new(env::current_exe().unwrap())
                .args(["--exact", "ffi::tests::child_calls", "--ignored", "--test-threads=1"])
                .env("LD_LIBRARY_PATH", &folder)
                .envs([("is_fork_initialized", kernel), ("fork_init", fork_init)])
                .envs([("EXPECTED_CALLS", calls), ("EXPECTED_ERROR", error)])
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[ignore = "part of another test"]
    fn child_calls() {
        assert!(crate::devices().unwrap().is_empty());
        let error = fork_protection().err().map(|error| error.to_string()).unwrap_or_default();
        let expected = env::var("EXPECTED_ERROR").unwrap();
        assert!(error.starts_with(&expected) && error.is_empty() == expected.is_empty(), "{error}");
        // SAFETY: the stub is loaded already. Its calls are text with a zero byte at the end, and
        // no call is made meanwhile.
        let calls = unsafe {
            let stub = Library::new("libibverbs.so.1").unwrap();
            CStr::from_ptr(*stub.get::<*const c_char>(b"calls\0").unwrap()).to_owned()
        };
        assert_eq!(calls.to_str().unwrap(), env::var("EXPECTED_CALLS").unwrap());
    }

    #[test]
    fn ffi_layouts_match_the_rdma_core_header() {
        let header = "/usr/include/infiniband/verbs.h";
        if !Path::new(header).exists() {
            // The layouts are also asserted when this crate is compiled.
            eprintln!("skipped: no {header} (libibverbs-dev)");
            return;
        }
        let mut source =
            "#include <infiniband/verbs.h>\n#include <stddef.h>\nint main(void) { return 0; }\n"
                .to_owned();
        for (structure, field, offset) in FIELDS {
            let path = in_c(structure, field);
            let check = format!("offsetof(struct {structure}, {path}) == {offset}");
            writeln!(source, "_Static_assert({check}, \"{structure}.{path}\");").unwrap();
        }
        for (structure, size) in SIZES.iter().filter(|(_, size)| *size > 0) {
            let check = format!("sizeof(struct {structure}) == {size}");
            writeln!(source, "_Static_assert({check}, \"size of {structure}\");").unwrap();
        }
        for (name, value) in VALUES {
            writeln!(source, "_Static_assert(({name}) == {value}, \"{name}\");").unwrap();
        }
        let file = env::temp_dir().join(format!("evenkeel-verbs-{}.c", process::id()));
        fs::write(&file, source).unwrap();
        let compiled = Command::new("cc").args(["-fsyntax-only"]).arg(&file).output();
        fs::remove_file(&file).unwrap();
        let compiled = compiled.unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }
}
