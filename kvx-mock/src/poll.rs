//! Polling: moves time, unless the fabric is manual, and gives an engine its events.

use kvx_core::backend::{Event, Events};
use rand::RngExt;

use crate::engine::Life;
use crate::net::{EngineId, Net, Pace};

/// Most steps of one poll.
const STEPS: u32 = 16;

impl Net {
    /// A poll by `engine`: moves the whole fabric, then gives the engine its events. An engine that is stopped or dead polls
    /// nothing.
    pub(crate) fn poll(&mut self, engine: EngineId, events: &mut Events) {
        let entry = self.engines.get(&engine);
        if entry.is_none_or(|entry| entry.stopped || entry.life == Life::Killed) {
            return;
        }
        if self.pace == Pace::Polled {
            if !self.schedule.is_empty() {
                for _ in 0..self.rng.random_range(1..=STEPS) {
                    if !self.step() {
                        break;
                    }
                }
            }
            self.settle_closing(engine);
        }
        self.give(engine, events);
    }

    /// Gives an engine its events, oldest first, as many as the caller has room for.
    fn give(&mut self, engine: EngineId, events: &mut Events) {
        let Some(entry) = self.engines.get_mut(&engine) else { return };
        while events.room() > 0 {
            let Some(event) = entry.inbox.events.pop_front() else { break };
            match &event {
                Event::Settled { id, .. } => {
                    let peer = entry.in_flight.remove(id);
                    if let Some(side) = peer.and_then(|peer| entry.peers.get_mut(peer)) {
                        side.in_flight = side.in_flight.saturating_sub(1);
                    }
                }
                Event::PeerDown { peer, .. } => {
                    entry.inbox.downs = entry.inbox.downs.saturating_sub(1);
                    for key in entry.peers.remove(*peer).into_iter().flat_map(|side| side.keys) {
                        entry.keys.remove(key);
                    }
                }
                Event::Notified { .. } => {
                    entry.inbox.notified = entry.inbox.notified.saturating_sub(1);
                }
                _ => {}
            }
            events.push(event);
        }
        self.make_room(engine);
    }
}
