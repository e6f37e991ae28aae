//! evenkeel-bench: everything that measures.
