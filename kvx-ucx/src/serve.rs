//! The other side of transfers that [ask](crate::ask): sending what a peer asks for, and taking what it sends.

use std::ops::Range as Tags;
use std::sync::Arc;

use kvx_core::id::{PeerId, RegionId};

use crate::ask::MOST_ASKED;
use crate::core::Core;
use crate::error::malformed;
use crate::message::{Kind, Range, Refusal, read_ranges};
use crate::contact::{Contact, Way};
use crate::sys::{Batch, Memory};
use crate::tags::of_list;

/// What is moved for one list of a peer's.
pub(crate) struct Service {
    peer: PeerId,
    kind: Kind,
    tags: Tags<u64>,
    batch: Batch,
}

/// The memory of a list, each region once as long as it is named in a row, and for each range which of these it is in.
type Named = (Vec<Arc<Memory>>, Vec<u32>);

impl Core {
    /// A list has come. One that an honest peer would not send ends its connection.
    pub(crate) fn listed(&mut self, peer: PeerId, kind: Kind, first: u64, payload: &[u8]) {
        let Some(known) = self.peers.get(peer) else { return };
        let announced = kind == Kind::Offer;
        let word = if announced { Some(known.word) } else { known.their_word };
        let list = read_ranges(payload).and_then(|list| {
            let tags = of_list(word?, announced, first, list.len())?;
            Some((list, tags))
        });
        let Some((list, tags)) = list else {
            let error = malformed("connection", "the peer sent a list that makes no sense");
            return self.end(peer, Some(error.with_context("bytes", payload.len())));
        };
        let count = u32::try_from(list.len()).unwrap_or(u32::MAX);
        let served = known.way.as_ref().map_or(0, |way| way.endpoint.service()) + known.early_ranges;
        // As much in each direction.
        if served.saturating_add(count) > 2 * MOST_ASKED {
            let error = malformed("connection", "the peer asked for more at a time than it may");
            return self.end(peer, Some(error.with_context("limit", MOST_ASKED)));
        }
        if matches!(known.way, Some(Way { contact: Contact::Made(..), .. })) {
            self.serve(peer, kind, tags, &list);
        } else if let Some(known) = self.peers.get_mut(peer) {
            known.early_ranges += count;
            known.early.push((kind, tags, list));
        }
    }

    /// There is a connection: now what came before can be served.
    pub(crate) fn serve_early(&mut self, peer: PeerId) {
        let early = self.peers.get_mut(peer).map(|known| {
            known.early_ranges = 0;
            std::mem::take(&mut known.early)
        });
        for (kind, tags, list) in early.unwrap_or_default() {
            self.serve(peer, kind, tags, &list);
        }
    }

    fn serve(&mut self, peer: PeerId, kind: Kind, tags: Tags<u64>, list: &[Range]) {
        let named = self.named(list);
        let token = self.token();
        let (Some(known), Some(worker)) = (self.peers.get_mut(peer), &self.worker) else { return };
        if kind == Kind::Offer {
            known.tags.heard(&tags);
        }
        let Some(way) = &known.way else { return };
        let (memory, which) = match named {
            Ok(named) => named,
            Err(refusal) => return self.refuse(peer, &tags, refusal),
        };
        let mut batch = Batch::new(worker, &way.endpoint.service, token, memory, Vec::new());
        for ((range, which), tag) in list.iter().zip(which).zip(tags.clone()) {
            match kind {
                Kind::Offer => batch.catch(worker, tag, which, range.offset, range.bytes),
                _ => batch.dispatch(&way.endpoint, tag, which, range.offset, range.bytes),
            }
        }
        self.touched = true;
        self.services.insert(token, Service { peer, kind, tags, batch });
        self.served(token);
    }

    /// Finds the memory of each range. It must be in one piece, as whoever has the key knows.
    fn named(&self, list: &[Range]) -> Result<Named, Refusal> {
        let (mut memory, mut which): Named = (Vec::new(), Vec::with_capacity(list.len()));
        let mut last = None;
        for range in list {
            let region = RegionId::new(range.region.0, range.region.1);
            if last != Some(region) {
                memory.push(Arc::clone(self.regions.get(region).ok_or(Refusal::Region)?));
                last = Some(region);
            }
            let Some(of) = memory.last() else { return Err(Refusal::Region) };
            if range.bytes == 0 || range.offset >= of.bytes() || range.bytes > of.run(range.offset) {
                return Err(Refusal::Outside);
            }
            if !of.is_of_host() {
                return Err(Refusal::Kind);
            }
            which.push(u32::try_from(memory.len() - 1).unwrap_or(u32::MAX));
        }
        Ok((memory, which))
    }

    fn refuse(&mut self, peer: PeerId, tags: &Tags<u64>, refusal: Refusal) {
        tracing::debug!(target: "kvx_ucx", "refused to peer {peer}: {refusal:?}");
        self.send(peer, Kind::Refused, tags.start, refusal.encode(tags.end - tags.start));
    }

    /// All of a list is over, if it is.
    pub(crate) fn served(&mut self, token: u64) {
        if self.services.get(&token).is_none_or(|service| service.batch.is_pending()) {
            return;
        }
        let Some(Service { peer, kind, tags, batch }) = self.services.remove(&token) else { return };
        if batch.failure().is_some() {
            self.refuse(peer, &tags, Refusal::Failed);
        } else if kind == Kind::Offer {
            self.send(peer, Kind::Landed, tags.start, Vec::new());
        }
    }

    /// The connection is over: what is sent ends with its endpoint, and what still comes is written nowhere.
    pub(crate) fn serve_no_more(&mut self, peer: PeerId) {
        let Some(worker) = &self.worker else { return };
        for service in self.services.values_mut().filter(|service| service.peer == peer) {
            service.batch.abandon(worker, 0..u64::MAX);
        }
        self.services.retain(|_, service| service.batch.is_pending());
    }
}
