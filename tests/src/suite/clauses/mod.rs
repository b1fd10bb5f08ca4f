//! The clauses, in groups. A new clause is one entry in the list of its group's file.

mod cancel;
mod claims;
mod closing;
mod data;
mod failure;
mod flow;
mod handshake;
mod keys;
mod meeting;
mod memory;
mod notify;
mod offsets;
mod regions;
mod revoke;
mod sever;
mod shapes;
mod threads;

use super::clause::Clause;

/// Clauses that belong together.
pub(crate) struct Group {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) clauses: &'static [Clause],
}

/// All of them, in the order of the page.
pub(crate) static GROUPS: &[Group] = &[
    claims::GROUP,
    memory::GROUP,
    keys::GROUP,
    handshake::GROUP,
    meeting::GROUP,
    data::GROUP,
    shapes::GROUP,
    notify::GROUP,
    flow::GROUP,
    cancel::GROUP,
    sever::GROUP,
    failure::GROUP,
    revoke::GROUP,
    threads::GROUP,
    closing::GROUP,
];
