//! What a rank needs of a control channel.

use std::fmt;

use kvx_core::Error;
use kvx_core::card::{Address, EngineName};

use crate::control::ControlStats;
use crate::protocol::peers::{Remote, SessionId};

/// Sessions with other processes: authenticated, in order, and lost when they are lost. Never blocks.
pub trait Channel: fmt::Debug {
    /// Dials an address. [`ChannelEvent::Up`] or [`ChannelEvent::DialFailed`] follows, in bounded time.
    fn dial(&mut self, address: &Address, expected: Option<&EngineName>);

    /// Sends to a session. Returns whether it was taken: where not, the session is over or its queue is full, and the message
    /// is lost, as any message may be.
    fn send(&mut self, session: SessionId, bytes: &[u8]) -> bool;

    /// Closes a session. Nothing more is heard of it.
    fn close(&mut self, session: SessionId);

    /// Appends what has happened.
    fn poll(&mut self, events: &mut Vec<ChannelEvent>);
    /// What it has counted since it was started, if it counts.
    fn stats(&self) -> Option<ControlStats> {
        None
    }
}

/// Something that happened to a session.
#[derive(Debug)]
#[non_exhaustive]
pub enum ChannelEvent {
    /// It is up.
    Up {
        /// Its number, never given twice.
        session: SessionId,
        /// Who is there.
        remote: Remote,
        /// The address that was dialled, where this side did.
        dialled: Option<Address>,
    },
    /// What was dialled could not be reached, or is not who was expected.
    DialFailed {
        /// The address.
        address: Address,
        /// Why.
        error: Error,
    },
    /// A message came.
    Message {
        /// By which session.
        session: SessionId,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// It is over.
    Down {
        /// Which.
        session: SessionId,
        /// Why, where it was not in order.
        error: Option<Error>,
    },
}
