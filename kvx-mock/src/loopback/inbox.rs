//! Events that wait to be polled.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use kvx_core::Error;
use kvx_core::backend::{Event, Events, Outcome};
use kvx_core::id::{PeerId, TransferId};

use super::connection::Connection;
use super::lock;
use crate::preset::Preset;

/// The events of one engine. Bounded: by what each peer may have in flight, by the room for notifications, and by the number
/// of connections that have ended.
#[derive(Default)]
pub(super) struct Inbox(Mutex<State>);

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    /// Notifications that wait, or are under way.
    claimed: usize,
    downs: usize,
    stopped: bool,
    closed: bool,
}

enum Waiting {
    /// The number is that of the end whose transfer it was.
    Settled(TransferId, Outcome, Arc<Connection>, usize),
    Notified(PeerId, Vec<u8>),
    Down(PeerId, Option<Error>),
}

impl Inbox {
    /// Keeps room for one notification, if there is any.
    pub(super) fn claim(&self) -> bool {
        let mut state = lock(&self.0);
        let room = state.claimed < Preset::MOST_NOTIFICATIONS;
        state.claimed += usize::from(room);
        room
    }

    /// Gives back the room for one.
    pub(super) fn unclaim(&self) {
        let mut state = lock(&self.0);
        state.claimed = state.claimed.saturating_sub(1);
    }

    /// A notification for which room was kept.
    pub(super) fn notified(&self, peer: PeerId, payload: Vec<u8>) {
        self.push(Waiting::Notified(peer, payload));
    }

    pub(super) fn settled(
        &self,
        id: TransferId,
        outcome: Outcome,
        connection: &Arc<Connection>,
        end: usize,
    ) {
        self.push(Waiting::Settled(id, outcome, Arc::clone(connection), end));
    }

    pub(super) fn down(&self, peer: PeerId, error: Option<Error>) {
        self.push(Waiting::Down(peer, error));
    }

    fn push(&self, event: Waiting) {
        let mut state = lock(&self.0);
        if !state.closed {
            state.downs += usize::from(matches!(event, Waiting::Down(..)));
            state.queue.push_back(event);
        }
    }

    /// Whether as many ended connections wait to be polled as may.
    pub(super) fn is_full_of_downs(&self) -> bool {
        lock(&self.0).downs >= Preset::MOST_NOTIFICATIONS
    }

    pub(super) fn set_stopped(&self, stopped: bool) {
        lock(&self.0).stopped = stopped;
    }

    /// Forgets everything, and takes nothing more.
    pub(super) fn clear(&self) {
        let mut state = lock(&self.0);
        state.closed = true;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        drop(queue);
    }

    /// Gives the oldest events, as many as there is room for, and says which peers are down by them.
    pub(super) fn give(&self, events: &mut Events) -> Vec<PeerId> {
        let mut downs = Vec::new();
        let mut state = lock(&self.0);
        if state.stopped {
            return downs;
        }
        while events.room() > 0 {
            let Some(waiting) = state.queue.pop_front() else { break };
            events.push(match waiting {
                Waiting::Settled(id, outcome, connection, end) => {
                    connection.ends[end].in_flight.fetch_sub(1, Relaxed);
                    Event::Settled { id, outcome }
                }
                Waiting::Notified(peer, payload) => {
                    state.claimed = state.claimed.saturating_sub(1);
                    Event::Notified { peer, payload }
                }
                Waiting::Down(peer, error) => {
                    state.downs = state.downs.saturating_sub(1);
                    downs.push(peer);
                    Event::PeerDown { peer, error }
                }
            });
        }
        downs
    }
}
