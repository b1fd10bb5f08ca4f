//! The control channel as a rank wants it.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};

use kvx_core::card::{Address, EngineName};
use kvx_core::{Error, Result};

use crate::control::{Control, ControlEvent, ControlStats, Sent};
use crate::protocol::peers::{Place, Remote, SessionId};
use crate::rank::{Channel, ChannelEvent};

/// A [`Control`] and what was dialled over it.
pub struct ControlChannel {
    control: Control,
    /// Sessions that were dialled and are not up, with what was dialled.
    dialling: BTreeMap<crate::control::SessionId, Address>,
    /// What could not even be begun.
    failed: Vec<(Address, Error)>,
    numbers: BTreeMap<SessionId, crate::control::SessionId>,
    events: Vec<ControlEvent>,
}

impl ControlChannel {
    /// A channel over `control`, which from now on is polled by nobody else.
    #[must_use]
    pub fn new(control: Control) -> Self {
        let (dialling, numbers) = (BTreeMap::new(), BTreeMap::new());
        Self { control, dialling, failed: Vec::new(), numbers, events: Vec::new() }
    }

    /// The control channel itself: for its statistics, and to listen.
    #[must_use]
    pub const fn control(&self) -> &Control {
        &self.control
    }

    /// Readable when there is something to be polled.
    ///
    /// # Errors
    ///
    /// None so far.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.control.as_fd())
    }
}

impl fmt::Debug for ControlChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlChannel")
            .field("control", &self.control)
            .field("dialling", &self.dialling)
            .finish_non_exhaustive()
    }
}

impl Channel for ControlChannel {
    fn dial(&mut self, address: &Address, expected: Option<&EngineName>) {
        match self.control.dial(address, expected.cloned()) {
            Ok(session) => {
                self.dialling.insert(session, address.clone());
            }
            Err(error) => self.failed.push((address.clone(), error)),
        }
    }

    fn send(&mut self, session: SessionId, bytes: &[u8]) -> bool {
        let Some(number) = self.numbers.get(&session) else { return false };
        matches!(self.control.send(*number, bytes), Ok(Sent::Sent))
    }

    fn close(&mut self, session: SessionId) {
        // Its end is still told, and passed over: its number is no longer known.
        if let Some(number) = self.numbers.remove(&session) {
            self.control.close(number);
        }
    }

    fn stats(&self) -> Option<ControlStats> {
        Some(self.control.stats())
    }

    fn poll(&mut self, events: &mut Vec<ChannelEvent>) {
        for (address, error) in self.failed.drain(..) {
            events.push(ChannelEvent::DialFailed { address, error });
        }
        self.control.poll(&mut self.events);
        for event in self.events.drain(..) {
            match event {
                ControlEvent::Up { session, remote, .. } => {
                    let number = SessionId(session.0);
                    self.numbers.insert(number, session);
                    let dialled = self.dialling.remove(&session);
                    let rank = remote
                        .rank
                        .map(|rank| Place { replica: rank.dp, rank: rank.replica_index() });
                    let remote =
                        Remote { engine: remote.engine, incarnation: remote.incarnation, rank };
                    events.push(ChannelEvent::Up { session: number, remote, dialled });
                }
                ControlEvent::Message { session, bytes } => {
                    let session = SessionId(session.0);
                    if self.numbers.contains_key(&session) {
                        events.push(ChannelEvent::Message { session, bytes });
                    }
                }
                ControlEvent::Down { session, why } => {
                    if let Some(address) = self.dialling.remove(&session) {
                        events.push(ChannelEvent::DialFailed { address, error: why });
                    } else if self.numbers.remove(&SessionId(session.0)).is_some() {
                        let session = SessionId(session.0);
                        events.push(ChannelEvent::Down { session, error: Some(why) });
                    }
                }
            }
        }
    }
}
