//! Which backend to take, and what it is asked to do.

use std::sync::Arc;

use kvx_core::backend::PeerInfo;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Result};

use super::config::Chosen;
use super::io::{Connection, GoneReason, Output, Step, StepId};
use super::peer::Link;
use super::{Failure, Peers, StepOf};

/// Most choices that are remembered: one for each list of offers.
const CHOICES: usize = 64;

impl Peers {
    /// Which backend to take for a peer whose card is there.
    pub(super) fn choose(&mut self, incarnation: Incarnation) -> Result<Arc<Chosen>> {
        let peer = self.peers.get_mut(&incarnation);
        let (Some(peer), Some(rank)) = (peer, &self.local.rank) else {
            return Err(Error::new(ErrorKind::Internal, "peers.choose", "there is no such peer"));
        };
        let Some(card) = &peer.card else {
            return Err(Error::new(ErrorKind::Internal, "peers.choose", "there is no card"));
        };
        let offers: Vec<String> = card
            .offers()
            .iter()
            .filter(|offer| rank.backends.contains(&offer.backend()))
            .map(|offer| match offer.options().text("place") {
                Some(place) => format!("{}@{place}", offer.backend()),
                None => offer.backend().to_owned(),
            })
            .collect();
        if offers.is_empty() {
            let theirs: Vec<_> = card.offers().iter().map(kvx_core::card::Offer::backend).collect();
            let (ours, theirs) = (rank.backends.join(", "), theirs.join(", "));
            let sides = (("this side", ours), ("the peer", theirs));
            return Err(Error::mismatch_between("peers.choose", "backends", sides.0, sides.1)
                .with_context("peer", &peer.remote)
                .with_remedy("open a backend on both sides that both have"));
        }
        if let Some(chosen) = self.choices.get(&offers) {
            peer.chosen = Some(Arc::clone(chosen));
            return Ok(Arc::clone(chosen));
        }
        let listed: Vec<&str> = offers.iter().map(String::as_str).collect();
        let chosen = Arc::new(self.choosing.choose(&listed)?);
        if !rank.backends.contains(&chosen.backend) || card.offer(chosen.backend).is_none() {
            return Err(Error::unsupported(
                "peers.choose",
                "what was chosen is not open on both sides",
            )
            .with_backend(chosen.backend)
            .with_context("offers", offers.join(", ")));
        }
        peer.chosen = Some(Arc::clone(&chosen));
        if self.choices.len() >= CHOICES {
            self.choices.clear();
        }
        self.choices.insert(offers, Arc::clone(&chosen));
        Ok(chosen)
    }

    pub(super) fn ask_backend(&mut self, peer: Incarnation, step: Step) -> StepId {
        let id = StepId(self.number());
        #[cfg(test)]
        if matches!(step, Step::Offer { .. } | Step::Accept { .. }) {
            let blocked = self.peers.get(&peer).is_some_and(super::peer::Peer::is_blocked);
            assert!(!blocked, "met while an earlier connection is ending");
        }
        let backend = match &step {
            Step::Offer { backend }
            | Step::Accept { backend, .. }
            | Step::Complete { backend, .. }
            | Step::Finish { backend, .. } => backend,
            Step::AddRegions { connection, .. } => connection.backend,
        };
        self.steps.insert(id, StepOf { peer, backend });
        self.out.push(Output::Step { id, step });
        id
    }

    /// Has the regions of a peer's card added.
    pub(super) fn add_regions(
        &mut self,
        incarnation: Incarnation,
        connection: Connection,
    ) -> Result<StepId> {
        let card = self.peers.get(&incarnation).and_then(|peer| peer.card.clone());
        let offer = card.as_ref().and_then(|card| card.offer(connection.backend));
        let (Some(card), Some(offer)) = (&card, offer) else {
            return Err(Error::unsupported(
                "peers",
                "the peer's card has no keys for this backend",
            )
            .with_backend(connection.backend));
        };
        let keys = offer.keys().iter().cloned();
        let regions = keys.zip(card.layout().regions().iter().map(|region| region.bytes)).collect();
        Ok(self.ask_backend(incarnation, Step::AddRegions { connection, regions }))
    }

    /// The regions of a peer are added, and it is known over what it is reached. `false` where that is not allowed.
    pub(super) fn added(&mut self, incarnation: Incarnation, info: PeerInfo) -> bool {
        let allowed = self.choosing.check_transport(&info);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return false };
        let Link::Up(up) = &mut peer.link else { return false };
        up.info = Some(info);
        up.regions = true;
        let Err(error) = allowed else { return true };
        let error = error.with_context("peer", &peer.remote);
        self.part(incarnation, GoneReason::Refused);
        self.fail_meeting(incarnation, Failure::permanent(error));
        false
    }
}
