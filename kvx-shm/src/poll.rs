//! Giving events.

use std::time::Instant;

use kvx_core::backend::{Event, Events};

use crate::engine::Shared;
use crate::state::State;
use crate::sys::socket;

/// How many polls in a row that find nothing go by before the door of all connections is heeded all the same: somebody may have
/// knocked whose connection is over.
const EMPTY: u32 = 64;

impl Shared {
    pub(crate) fn poll(&self, events: &mut Events) {
        let mut state = self.lock_soon();
        let mut wake = false;
        if self.options.spin_us > 0 {
            state.polled = Some(Instant::now());
            if !std::mem::replace(&mut state.spins, true) {
                self.table.listens_no_more();
                // It looks by itself how long that lasts.
                wake = true;
            }
        }
        // Sooner than the thread that would be woken for it.
        if state.events.is_empty() {
            self.look(&mut state);
        }
        loop {
            while events.room() > 0
                && let Some(event) = state.events.pop_front()
            {
                wake |= given(&mut state, &event);
                events.push(event);
            }
            if !state.events.is_empty() {
                break;
            }
            if !self.heed(&mut state) {
                break;
            }
            if events.room() == 0 {
                self.signal(&mut state);
                break;
            }
        }
        drop(state);
        if wake {
            self.wake();
        }
    }

    /// Makes the descriptor unreadable, as there are no events any more, and heeds knocks: doors are quiet until there is more,
    /// and then peers knock again. Returns whether there is more already.
    fn heed(&self, state: &mut State) -> bool {
        let common = self.porch.is_common();
        let mut clears = std::mem::take(&mut state.signalled);
        if common {
            state.empty += 1;
            clears |= state.empty >= EMPTY || has_knocked(state);
        }
        if clears {
            // Before looking who has knocked: a knock that this takes is then seen.
            self.porch.clear();
            state.empty = 0;
        } else if common {
            return false;
        }
        let mut heard = false;
        let State { open, peers, .. } = state;
        for peer in open.values() {
            let Some(known) = peers.get_mut(*peer) else { continue };
            let Some(link) = &known.link else { continue };
            let knocks = link.knocks();
            if knocks != known.heeded {
                if let Some(door) = link.door() {
                    socket::heed(door);
                }
                known.heeded = knocks;
                heard = true;
            }
        }
        if heard && !state.spins {
            self.table.listens();
            // What came before they could know.
            self.look(state);
        }
        !state.events.is_empty()
    }

    /// The program has stopped polling: from now on it is woken.
    pub(crate) fn listens_again(&self, state: &mut State) {
        if std::mem::replace(&mut state.spins, false) {
            self.table.listens();
            self.signal(state);
        }
    }
}

/// Whether a peer has knocked since that was heeded.
fn has_knocked(state: &State) -> bool {
    state.open.values().any(|peer| {
        let known = state.peers.get(*peer);
        known.is_some_and(|known| {
            known.link.as_ref().is_some_and(|link| link.knocks() != known.heeded)
        })
    })
}

/// Forgets what an event that is given was kept for. Returns whether the thread that sleeps on the sockets can go on.
fn given(state: &mut State, event: &Event) -> bool {
    match event {
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
                return known.stalled;
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
    false
}
