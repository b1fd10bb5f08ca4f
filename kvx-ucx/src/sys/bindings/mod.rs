//! UCX's C interface, as `bindgen` writes it from the headers of 1.22: see `README.md` beside this file for the command.

#[expect(
    nonstandard_style,
    unreachable_pub,
    dead_code,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::upper_case_acronyms,
    reason = "generated"
)]
pub(crate) mod types;

#[expect(
    unreachable_pub,
    dead_code,
    unsafe_op_in_unsafe_fn,
    clippy::too_many_arguments,
    clippy::use_self,
    reason = "generated"
)]
pub(crate) mod functions;
