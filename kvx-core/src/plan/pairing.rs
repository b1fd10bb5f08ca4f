//! Which ranks of two engines talk to which, about which heads of which layers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::roster::Roster;
use crate::layout::{RankLayout, Tensor, TensorKey};
use crate::{Error, Result};

/// Which producer rank gives what to which consumer rank.
///
/// Ranks are numbered as in the slices that it was made from, usually the ranks of one data parallel replica in the order of
/// [`Grid::replica`](crate::layout::Grid::replica). Both engines come to the same result from the same layouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairing {
    producers: usize,
    consumers: usize,
    pairs: Vec<Pair>,
}

/// One producer rank and one consumer rank, and what the first gives to the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Number of the producer rank.
    pub producer: usize,
    /// Number of the consumer rank.
    pub consumer: usize,
    /// What is given, sorted by tensor and head. Never empty.
    pub shares: Vec<Share>,
}

/// Some heads of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// Layer and role.
    pub key: TensorKey,
    /// First global head.
    pub first_head: u32,
    /// One past the last global head.
    pub end_head: u32,
}

/// One rank's part of a tensor: (rank, heads).
type Holding = (usize, Range<u32>);
/// (producer, consumer, heads).
type Assignment = (usize, usize, Range<u32>);

#[derive(Default, PartialEq, Eq)]
struct Holders {
    producers: Vec<Holding>,
    consumers: Vec<Holding>,
}

impl Pairing {
    /// Pairs the ranks of two engines.
    ///
    /// Where several producer ranks hold the same heads (more tensor parallel ranks than KV heads, or MLA), each consumer rank
    /// reads from one of them, and the consumers are shared out among them as evenly as can be. `rotation` shifts that
    /// choice: consumer replicas that use different values (their data parallel rank, say) load different replicas.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), naming the tensor and both values: a tensor that only one
    /// engine has (and that is not local-only), another number of heads, or heads that no producer rank holds.
    pub fn new(producers: &[RankLayout], consumers: &[RankLayout], rotation: u32) -> Result<Self> {
        let mut tensors: BTreeMap<TensorKey, Holders> = BTreeMap::new();
        let mut totals: BTreeMap<TensorKey, (u32, bool)> = BTreeMap::new();
        let sides = [(producers, true), (consumers, false)];
        for (layouts, producing) in sides {
            for (rank, layout) in layouts.iter().enumerate() {
                for tensor in layout.tensors().iter().filter(|tensor| !tensor.local_only) {
                    check_total(&mut totals, tensor, producing)?;
                    let holders = tensors.entry(tensor.key()).or_default();
                    let side =
                        if producing { &mut holders.producers } else { &mut holders.consumers };
                    side.push((rank, tensor.head_range()));
                }
            }
        }
        let mut pairs: BTreeMap<(usize, usize), Vec<Share>> = BTreeMap::new();
        // Most layers are held alike, so the answer for the last one is kept.
        let mut last: Option<(Holders, Vec<Assignment>)> = None;
        for (key, holders) in tensors {
            let assignments = match last.take() {
                Some((known, assignments)) if known == holders => assignments,
                _ => assign(key, &holders, rotation as usize)?,
            };
            for (producer, consumer, heads) in &assignments {
                pairs.entry((*producer, *consumer)).or_default().push(Share {
                    key,
                    first_head: heads.start,
                    end_head: heads.end,
                });
            }
            last = Some((holders, assignments));
        }
        let pairs = pairs
            .into_iter()
            .map(|((producer, consumer), shares)| Pair { producer, consumer, shares })
            .collect();
        Ok(Self { producers: producers.len(), consumers: consumers.len(), pairs })
    }

    /// All pairs, sorted by producer, then consumer.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// The pair of these two ranks, if they have anything to say to each other.
    #[must_use]
    pub fn pair(&self, producer: usize, consumer: usize) -> Option<&Pair> {
        let find = |pair: &Pair| (pair.producer, pair.consumer).cmp(&(producer, consumer));
        self.pairs.binary_search_by(find).ok().map(|index| &self.pairs[index])
    }

    /// Producer ranks that `consumer` needs data from, in order.
    pub fn sources_of(&self, consumer: usize) -> impl Iterator<Item = usize> + '_ {
        self.pairs.iter().filter(move |pair| pair.consumer == consumer).map(|pair| pair.producer)
    }

    /// Consumer ranks that need data from `producer`, in order. May be empty: a replica that nobody was sent to.
    pub fn readers_of(&self, producer: usize) -> impl Iterator<Item = usize> + '_ {
        self.pairs.iter().filter(move |pair| pair.producer == producer).map(|pair| pair.consumer)
    }

    /// Consumer ranks that `producer` must hear from before it may free a request's blocks: its readers; or, where it has
    /// none, one consumer rank chosen so that these are shared out evenly. Empty only when an engine has no ranks.
    #[must_use]
    pub fn roster_of(&self, producer: usize) -> Roster {
        let readers: BTreeSet<usize> = self.readers_of(producer).collect();
        if !readers.is_empty() || self.consumers == 0 || self.producers == 0 {
            return Roster::new(readers);
        }
        Roster::new([producer.min(self.producers - 1) * self.consumers / self.producers])
    }

    /// Producer ranks that `consumer` must tell when it is done: those whose [`roster`](Self::roster_of) it is on.
    pub fn confirms_to(&self, consumer: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.producers)
            .filter(move |producer| self.roster_of(*producer).missing().any(|r| r == consumer))
    }
}

fn check_total(
    totals: &mut BTreeMap<TensorKey, (u32, bool)>,
    tensor: &Tensor,
    producing: bool,
) -> Result<()> {
    let (key, total) = (tensor.key(), tensor.heads.total);
    let (known, by_producer) = *totals.entry(key).or_insert((total, producing));
    if known == total {
        return Ok(());
    }
    let field = format!("{key} heads");
    Err(match (by_producer, producing) {
        (true, false) => Error::mismatch("pairing", field, known, total),
        (false, true) => Error::mismatch("pairing", field, total, known),
        (side, _) => {
            let name = if side { "producer" } else { "consumer" };
            Error::mismatch_between("pairing", field, (name, known), (name, total))
        }
    })
}

fn assign(key: TensorKey, holders: &Holders, rotation: usize) -> Result<Vec<Assignment>> {
    let Holders { producers, consumers } = holders;
    if producers.is_empty() || consumers.is_empty() {
        let has = |side: &[Holding]| if side.is_empty() { "no such tensor" } else { "it" };
        return Err(Error::mismatch("pairing", key.to_string(), has(producers), has(consumers))
            .with_remedy("configure both engines alike, or declare the tensor local-only"));
    }
    let bounds: BTreeSet<u32> =
        producers.iter().chain(consumers).flat_map(|(_, heads)| [heads.start, heads.end]).collect();
    let bounds: Vec<u32> = bounds.into_iter().collect();
    let mut list: Vec<Assignment> = Vec::new();
    for pair in bounds.windows(2) {
        let heads = pair[0]..pair[1];
        let holds =
            |holding: &&Holding| holding.1.start <= heads.start && heads.end <= holding.1.end;
        let sources: Vec<usize> = producers.iter().filter(holds).map(|(rank, _)| *rank).collect();
        let readers: Vec<usize> = consumers.iter().filter(holds).map(|(rank, _)| *rank).collect();
        if sources.is_empty() && !readers.is_empty() {
            return Err(Error::mismatch(
                "pairing",
                format!("{key} heads {}..{}", heads.start, heads.end),
                "no rank with them",
                format!("them on rank {}", readers[0]),
            ));
        }
        for (index, consumer) in readers.iter().enumerate() {
            let source = (index * sources.len() / readers.len() + rotation) % sources.len();
            list.push((sources[source], *consumer, heads.clone()));
        }
    }
    list.sort_by_key(|(producer, consumer, heads)| (*producer, *consumer, heads.start));
    list.dedup_by(|next, kept| {
        let joins = (next.0, next.1, next.2.start) == (kept.0, kept.1, kept.2.end);
        if joins {
            kept.2.end = next.2.end;
        }
        joins
    });
    Ok(list)
}
