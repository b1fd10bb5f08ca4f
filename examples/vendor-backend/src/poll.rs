//! Events: each is given to one caller, once.

use kvx_core::backend::{Event, Events};

use crate::connection::Shared;

impl Shared {
    /// Gives as many events as there is room for. What they end is forgotten with them.
    pub(crate) fn poll(&self, events: &mut Events) {
        self.with(|state| {
            while events.room() > 0
                && let Some(event) = state.events.pop_front()
            {
                match &event {
                    Event::Settled { id, .. } => {
                        let posted = state.posted.remove(id).map(|posted| posted.peer);
                        if let Some(peer) = posted.and_then(|peer| state.peers.get_mut(&peer)) {
                            peer.in_flight = peer.in_flight.saturating_sub(1);
                        }
                    }
                    Event::Notified { peer, .. } => {
                        if let Some(peer) = state.peers.get_mut(peer) {
                            peer.untaken = peer.untaken.saturating_sub(1);
                        }
                    }
                    Event::PeerDown { peer, .. } => {
                        state.peers.remove(peer);
                        state.keys.retain(|_, known| known.peer != *peer);
                    }
                    _ => {}
                }
                events.push(event);
            }
        });
    }
}
