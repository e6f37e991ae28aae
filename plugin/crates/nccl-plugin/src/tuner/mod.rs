//! `ncclTuner`: the tables of the tuner, v2 to v6, over [`evenkeel_tuner`]. NCCL uses them where `NCCL_TUNER_PLUGIN` is unset.

mod calls;
mod vtable;
