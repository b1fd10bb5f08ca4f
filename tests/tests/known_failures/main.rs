//! Failures that users of other systems have reported, each as a small input with the right value. The numbers are those
//! of kvx's own list; the references are to the public reports.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod blocks;
mod common;
mod heads;
mod layouts;
mod states;
