//! What a side posted and what it was told: the laws that hold in every clause.

use std::collections::{BTreeMap, BTreeSet};

use std::time::Instant;

use kvx_core::ErrorKind;
use kvx_core::id::PeerId;

use super::clause::{Breach, Verdict, ensure};
use super::command::{End, Refusal, Seen};

/// Everything that one side posted and polled.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    in_flight: BTreeMap<u64, PeerId>,
    settled: BTreeMap<u64, End>,
    notes: Vec<(PeerId, Vec<u8>)>,
    down: BTreeMap<PeerId, Option<Refusal>>,
    /// Peers that this side severed, revoked or closed, and when it first said so.
    ended: BTreeMap<PeerId, Instant>,
    /// What this side asked to give up.
    cancelled: BTreeSet<u64>,
    /// What was in flight when this side deregistered a region: that may have been its own.
    disturbed: BTreeSet<u64>,
    closed: bool,
}

impl Ledger {
    pub(crate) fn posted(&mut self, id: u64, peer: PeerId) {
        self.settled.remove(&id);
        self.cancelled.remove(&id);
        self.disturbed.remove(&id);
        self.in_flight.insert(id, peer);
    }

    pub(crate) fn ended(&mut self, peer: PeerId) {
        self.ended.entry(peer).or_insert_with(Instant::now);
    }

    /// When this side first severed or revoked a peer.
    pub(crate) fn ended_at(&self, peer: PeerId) -> Option<Instant> {
        self.ended.get(&peer).copied()
    }

    pub(crate) fn cancelled(&mut self, id: u64) {
        self.cancelled.insert(id);
    }

    pub(crate) fn deregistered(&mut self) {
        self.disturbed.extend(self.in_flight.keys());
    }

    pub(crate) const fn closed(&mut self) {
        self.closed = true;
    }

    /// Takes an event in. The laws are those of the clauses that are named.
    pub(crate) fn event(&mut self, event: Seen) -> Verdict {
        match event {
            Seen::Settled { id, end } => {
                ensure!(
                    !self.settled.contains_key(&id) || self.in_flight.contains_key(&id),
                    "transfer {id} settled twice: first as {:?}, then as {end:?} (law of settled.once)",
                    self.settled[&id]
                );
                let Some(peer) = self.in_flight.remove(&id) else {
                    return Err(Breach::new(format!(
                        "transfer {id} settled as {end:?}, but was never posted (law of submit.error_posts_nothing)"
                    )));
                };
                let mine = self.closed || self.ended.contains_key(&peer);
                match &end {
                    End::Done => {}
                    End::Cancelled => ensure!(
                        mine || self.cancelled.contains(&id),
                        "transfer {id} was cancelled, but this side neither cancelled it nor severed its peer \
                         (law of failure.kinds)"
                    ),
                    End::Failed(error) => ensure!(
                        self.closed
                            || self.disturbed.contains(&id)
                            || matches!(error.kind, ErrorKind::Peer | ErrorKind::Fabric),
                        "transfer {id}, which was accepted, failed with a {} error: only the peer or the fabric can \
                         be at fault (law of failure.kinds): {}",
                        error.kind,
                        error.text
                    ),
                }
                self.settled.insert(id, end);
                ensure!(
                    !self.down.contains_key(&peer),
                    "transfer {id} settled after its peer {peer} was down (law of sever.peer_down_last)"
                );
            }
            Seen::Notified { peer, payload } => {
                ensure!(
                    !self.down.contains_key(&peer),
                    "notified by peer {peer}, which was down (law of sever.peer_down_last)"
                );
                self.notes.push((peer, payload));
            }
            Seen::PeerDown { peer, error } => {
                let left: Vec<_> = self.to(peer);
                ensure!(
                    left.is_empty(),
                    "peer {peer} was down before transfers {left:?} to it settled (law of sever.peer_down_last)"
                );
                let mine = self.closed || self.ended.contains_key(&peer);
                ensure!(
                    mine || error.is_some(),
                    "peer {peer} was down with no error, although this side did not sever it (law of sever.peer_down_last)"
                );
                ensure!(
                    self.down.insert(peer, error).is_none(),
                    "peer {peer} was down twice (law of sever.peer_down_last)"
                );
            }
        }
        Ok(())
    }

    pub(crate) fn settled(&self, id: u64) -> Option<&End> {
        self.settled.get(&id)
    }

    pub(crate) fn notes(&self) -> &[(PeerId, Vec<u8>)] {
        &self.notes
    }

    pub(crate) fn down(&self, peer: PeerId) -> Option<&Option<Refusal>> {
        self.down.get(&peer)
    }

    /// What is in flight to a peer.
    pub(crate) fn to(&self, peer: PeerId) -> Vec<u64> {
        self.in_flight.iter().filter(|(_, to)| **to == peer).map(|(id, _)| *id).collect()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerId = PeerId::new(0, 0);

    fn settled(id: u64) -> Seen {
        Seen::Settled { id, end: End::Done }
    }

    fn down() -> Seen {
        Seen::PeerDown { peer: PEER, error: None }
    }

    #[test]
    fn each_law_is_named_when_it_is_broken() {
        let laws: [(&str, Vec<Seen>); 6] = [
            ("settled.once", vec![settled(1), settled(1)]),
            ("submit.error_posts_nothing", vec![settled(2)]),
            ("before transfers [1]", vec![down()]),
            ("down twice", vec![settled(1), down(), down()]),
            (
                "which was down",
                vec![settled(1), down(), Seen::Notified { peer: PEER, payload: Vec::new() }],
            ),
            ("no error", vec![settled(1), Seen::PeerDown { peer: PeerId::new(1, 0), error: None }]),
        ];
        for (named, events) in laws {
            let mut ledger = Ledger::default();
            ledger.posted(1, PEER);
            ledger.ended(PEER);
            let broken = events.into_iter().try_for_each(|event| ledger.event(event)).unwrap_err();
            assert!(broken.to_string().contains(named), "{broken}");
        }
    }

    #[test]
    fn a_failure_is_of_a_kind_that_fits() {
        let refusal = |kind| Refusal { kind, reconnect: false, text: "test".into() };
        let kinds =
            [(ErrorKind::Misuse, false), (ErrorKind::Peer, true), (ErrorKind::Fabric, true)];
        for (kind, fits) in kinds {
            let mut ledger = Ledger::default();
            ledger.posted(1, PEER);
            let end = End::Failed(refusal(kind));
            assert_eq!(ledger.event(Seen::Settled { id: 1, end }).is_ok(), fits, "{kind:?}");
        }
        for asked in [false, true] {
            let mut ledger = Ledger::default();
            ledger.posted(1, PEER);
            if asked {
                ledger.cancelled(1);
            }
            let seen = ledger.event(Seen::Settled { id: 1, end: End::Cancelled });
            assert_eq!(seen.is_ok(), asked);
        }
    }

    #[test]
    fn an_id_may_be_used_again_once_it_settled() {
        let mut ledger = Ledger::default();
        for _ in 0..2 {
            ledger.posted(1, PEER);
            assert!(ledger.settled(1).is_none() && ledger.to(PEER) == [1]);
            ledger.event(settled(1)).unwrap();
            assert!(ledger.settled(1).is_some() && ledger.in_flight() == 0);
        }
    }
}
