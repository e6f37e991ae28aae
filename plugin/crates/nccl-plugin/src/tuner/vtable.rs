//! The exported tables, one per version.

use evenkeel_nccl_abi::{TunerV2, TunerV3, TunerV4, TunerV5, TunerV6};

use super::calls::{
    finalize, get_chunk_size, get_coll_info_v2, get_coll_info_v3, get_coll_info_v4, init_v2,
    init_v5,
};
use crate::net::NAME;

macro_rules! table {
    ($symbol:ident: $table:ident, { $($own:tt)* }) => {
        /// NCCL finds the table by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name is NCCL's")]
        static $symbol: $table =
            $table { name: NAME.as_ptr(), finalize: Some(finalize), $($own)* };
    };
}

table!(ncclTunerPlugin_v2: TunerV2, {
    init: Some(init_v2),
    get_coll_info: Some(get_coll_info_v2),
});
table!(ncclTunerPlugin_v3: TunerV3, {
    init: Some(init_v2),
    get_coll_info: Some(get_coll_info_v3),
});
table!(ncclTunerPlugin_v4: TunerV4, {
    init: Some(init_v2),
    get_coll_info: Some(get_coll_info_v4),
});
table!(ncclTunerPlugin_v5: TunerV5, {
    init: Some(init_v5),
    get_coll_info: Some(get_coll_info_v4),
});
table!(ncclTunerPlugin_v6: TunerV6, {
    init: Some(init_v5),
    get_coll_info: Some(get_coll_info_v4),
    get_chunk_size: Some(get_chunk_size),
});
