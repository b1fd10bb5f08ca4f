//! Giving events.

use std::time::Instant;

use kvx_core::backend::{Event, Events};

use crate::core::Core;
use crate::sys::Worker;

/// Most rounds of progress in one call.
const ROUNDS: u32 = 8;

impl Core {
    /// Makes progress, and gives as many events as there is room for. What they end is forgotten with them.
    pub(crate) fn poll(&mut self, events: &mut Events) {
        let entered = Instant::now();
        self.polls(entered);
        let mut rounds = 0;
        while rounds < ROUNDS && self.progress() && self.events.is_empty() {
            rounds += 1;
        }
        let worker = self.worker.as_ref().map(Worker::descriptor);
        self.door.polled(worker, rounds > 0, !self.events.is_empty());
        while events.room() > 0 {
            let Some(event) = self.events.pop_front() else { break };
            match &event {
                Event::Settled { id, .. } => self.forget(*id),
                Event::Notified { peer, .. } => self.note_taken(*peer),
                Event::PeerDown { peer, .. } => {
                    let gone = self.peers.remove(*peer);
                    for key in gone.into_iter().flat_map(|known| known.keys) {
                        self.keys.remove(key);
                    }
                }
                _ => {}
            }
            events.push(event);
        }
        self.leaves(entered);
    }
}
