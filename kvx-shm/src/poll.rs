//! Giving events.

use std::time::Instant;

use kvx_core::backend::{Event, Events};

use crate::engine::Shared;

impl Shared {
    pub(crate) fn poll(&self, events: &mut Events) {
        let mut state = self.lock();
        let mut wake = false;
        if self.options.spin_us > 0 {
            state.polled = Some(Instant::now());
        }
        if state.events.is_empty() {
            // Sooner than the thread that would be woken for it.
            self.look(&mut state);
        }
        while events.room() > 0 {
            let Some(event) = state.events.pop_front() else { break };
            match &event {
                Event::Settled { id, .. } => {
                    let peer = state.flights.remove(id).map(|flight| flight.peer);
                    if let Some(known) = peer.and_then(|peer| state.peers.get_mut(peer)) {
                        known.in_flight = known.in_flight.saturating_sub(1);
                    }
                }
                Event::Notified { peer, payload } => {
                    if let Some(known) = state.peers.get_mut(*peer) {
                        known.notes = known.notes.saturating_sub(1);
                        known.note_bytes = known.note_bytes.saturating_sub(payload.len());
                        // Half of them are gone, or all that are polled at once.
                        wake |= known.stalled;
                    }
                }
                Event::PeerDown { peer, .. } => {
                    let gone = state.peers.remove(*peer);
                    for key in gone.into_iter().flat_map(|known| known.keys) {
                        state.keys.remove(key);
                    }
                }
                _ => {}
            }
            events.push(event);
        }
        if state.signalled && state.events.is_empty() {
            state.signalled = false;
            let mut count = [0; 8];
            // It was written once since it was read last.
            let _ = rustix::io::read(&self.signal, &mut count);
        }
        drop(state);
        if wake {
            self.wake();
        }
    }
}
