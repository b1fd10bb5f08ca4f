//! The oracle itself: a map of every byte.

use std::collections::BTreeSet;

use kvx_core::layout::{RankLayout, Tensor, TensorKey};
use kvx_core::plan::Pair;

use super::address::{describe, element};
use super::fault::Fault;
use super::memory::Memory;
use super::rules::units;
use super::scene::Scene;
use super::tag::{noise, tag};

/// Where a byte comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Number of the producer rank.
    pub rank: u32,
    /// Region of its layout.
    pub region: u32,
    /// Offset in that region, in bytes.
    pub offset: u64,
}

/// An [`Origin`] or none, in eight bytes, because there is one for every byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell(u64);

/// Bits for the offset in a region, and for the number of a region: layouts have at most 4,096.
const OFFSET_BITS: u32 = 36;
const REGION_BITS: u32 = 12;

impl Cell {
    pub(super) const NONE: Self = Self(0);

    pub(super) fn new(origin: Origin) -> Self {
        let Origin { rank, region, offset } = origin;
        assert!(
            rank < u16::MAX.into() && region >> REGION_BITS == 0 && offset >> OFFSET_BITS == 0,
            "{origin:?} is larger than the oracle can hold"
        );
        let place = (u64::from(rank) << REGION_BITS | u64::from(region)) << OFFSET_BITS | offset;
        Self(place + 1)
    }

    pub(super) fn origin(self) -> Option<Origin> {
        let place = self.0.checked_sub(1)?;
        let low = |bits: u32, of: u64| of & ((1 << bits) - 1);
        let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Some(Origin {
            rank: number(place >> (OFFSET_BITS + REGION_BITS)),
            region: number(low(REGION_BITS, place >> OFFSET_BITS)),
            offset: low(OFFSET_BITS, place),
        })
    }
}

/// A consumer's byte, and what was done to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Byte {
    pub(super) value: u8,
    pub(super) origin: Cell,
    /// At most 255 are counted.
    pub(super) writes: u8,
}

/// One value for every byte of a rank: by region, then offset.
pub(super) type PerByte<T> = Vec<Vec<T>>;

/// As a position in a slice.
pub(super) fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Number of bytes of each region.
pub(super) fn sizes(layout: &RankLayout) -> impl Iterator<Item = usize> + '_ {
    layout.regions().iter().map(|region| index(region.bytes))
}

/// Sides of a scene in the noise of [`Memory`].
pub(super) const PRODUCER: u64 = 1;
pub(super) const CONSUMER: u64 = 2;

/// Knows what every byte of every consumer rank must be: see the [module documentation](super).
pub struct Oracle<'a> {
    pub(super) scene: &'a Scene,
    /// By consumer rank.
    pub(super) wanted: Vec<PerByte<Cell>>,
    /// By consumer rank.
    values: Vec<PerByte<u8>>,
}

impl std::fmt::Debug for Oracle<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("scene", &self.scene).finish_non_exhaustive()
    }
}

impl<'a> Oracle<'a> {
    /// What `scene` must do when its ranks are paired as in `pairs`.
    ///
    /// # Errors
    ///
    /// [`Fault::Pairing`] where a head that a consumer rank needs is given by no producer rank or by more than one, or a rank
    /// gives or takes what it does not hold; [`Fault::Scene`] where the request cannot be served.
    pub fn new(scene: &'a Scene, pairs: &[Pair]) -> Result<Self, Fault> {
        if scene.range.start > scene.range.end || scene.range.end > scene.tokens {
            return Err(Fault::Scene(format!("{:?} of {} tokens", scene.range, scene.tokens)));
        }
        check_shares(scene, pairs)?;
        let mut oracle = Self { scene, wanted: Vec::new(), values: Vec::new() };
        for (consumer, layout) in scene.consumer.ranks.iter().enumerate() {
            oracle.wanted.push(sizes(layout).map(|bytes| vec![Cell::NONE; bytes]).collect());
            oracle.values.push(canary(consumer, layout));
            for tensor in layout.tensors().iter().filter(|tensor| !tensor.local_only) {
                for head in tensor.head_range() {
                    let producer = source(scene, pairs, consumer, tensor.key(), head)?;
                    if scene.layers.contains(&tensor.layer) {
                        oracle.want(producer, (consumer, layout), tensor, head)?;
                    }
                }
            }
        }
        Ok(oracle)
    }

    fn want(
        &mut self,
        producer: usize,
        (consumer, layout): (usize, &RankLayout),
        to: &Tensor,
        head: u32,
    ) -> Result<(), Fault> {
        let from_layout = &self.scene.producer.ranks[producer];
        let Some(from) = holding(from_layout, to.key(), head) else {
            return Err(Fault::Pairing(format!(
                "producer {producer} does not hold head {head} of {}",
                to.key()
            )));
        };
        let region = to.region as usize;
        for unit in units(self.scene, (from_layout, from), (layout, to))? {
            let salt = if unit.unused { 1 + producer as u64 } else { 0 };
            for dim in 0..to.dim.extent {
                let at = element(to, unit.to, head, dim);
                let source = element(from, unit.from, head, dim);
                let value = tag(to.key(), head, unit.number, dim, salt);
                for byte in 0..to.dtype.bytes() {
                    let cell = &mut self.wanted[consumer][region][index(at + byte)];
                    if *cell != Cell::NONE {
                        return Err(Fault::Scene(format!(
                            "consumer {consumer} region {region} offset {} would be written twice",
                            at + byte
                        )));
                    }
                    *cell = Cell::new(Origin {
                        rank: rank_number(producer),
                        region: from.region,
                        offset: source + byte,
                    });
                    self.values[consumer][region][index(at + byte)] = value[index(byte)];
                }
            }
        }
        Ok(())
    }

    /// Where a byte of a consumer rank must come from; `None` if it must not change.
    #[must_use]
    pub fn origin(&self, consumer: usize, region: u32, offset: u64) -> Option<Origin> {
        self.wanted.get(consumer)?.get(region as usize)?.get(index(offset))?.origin()
    }

    /// How many bytes must be moved, over all consumer ranks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let cells = self.wanted.iter().flatten().flatten();
        cells.filter(|cell| cell.origin().is_some()).count() as u64
    }

    /// The memory of all ranks before the transfer: the request's elements on the producers hold their tags, everything else
    /// noise.
    ///
    /// # Errors
    ///
    /// [`Fault::Scene`] where the request cannot be served; [`Fault::Contradiction`] where a producer would have to hold two
    /// elements in one place.
    pub fn memory(&self) -> Result<Memory, Fault> {
        let scene = self.scene;
        let mut producers = Vec::new();
        for (producer, layout) in scene.producer.ranks.iter().enumerate() {
            let mut regions: PerByte<u8> = sizes(layout)
                .enumerate()
                .map(|(region, bytes)| noise(PRODUCER, producer, region, bytes))
                .collect();
            let mut held: PerByte<bool> = sizes(layout).map(|bytes| vec![false; bytes]).collect();
            for from in layout.tensors().iter().filter(|tensor| !tensor.local_only) {
                let Some((to_layout, to)) = scene.consumer.any_tensor(from.key()) else { continue };
                for unit in units(scene, (layout, from), (to_layout, to))? {
                    let salt = if unit.unused { 1 + producer as u64 } else { 0 };
                    for head in from.head_range() {
                        for dim in 0..from.dim.extent {
                            let value = tag(from.key(), head, unit.number, dim, salt);
                            let at = index(element(from, unit.from, head, dim));
                            for (at, value) in (at..at + index(from.dtype.bytes())).zip(value) {
                                let place = &mut regions[from.region as usize][at];
                                let held = &mut held[from.region as usize][at];
                                if *held && *place != value {
                                    return Err(contradiction(producer, layout, from.region, at));
                                }
                                (*place, *held) = (value, true);
                            }
                        }
                    }
                }
            }
            producers.push(regions);
        }
        let consumers =
            scene.consumer.ranks.iter().enumerate().map(|(c, layout)| canary(c, layout));
        Ok(Memory::new(producers, consumers.collect()))
    }

    /// Checks that the transfer has been carried out in `memory`, every byte of it, and nothing else.
    ///
    /// # Errors
    ///
    /// [`Fault::Bytes`], naming the first wrong byte, its logical element, and what was expected.
    pub fn check(&self, memory: &Memory) -> Result<(), Fault> {
        for (consumer, regions) in self.wanted.iter().enumerate() {
            for (region, cells) in regions.iter().enumerate() {
                for (offset, cell) in cells.iter().enumerate() {
                    let expected = Byte {
                        value: self.values[consumer][region][offset],
                        origin: *cell,
                        writes: u8::from(*cell != Cell::NONE),
                    };
                    let seen = memory.byte(consumer, region, offset);
                    if seen != Some(expected) {
                        return Err(self.fault((consumer, region, offset), expected, seen));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks only the values of one region of a consumer rank, for transfers that were really carried out.
    ///
    /// # Errors
    ///
    /// [`Fault::Bytes`], naming the first wrong byte and its logical element.
    pub fn check_values(&self, consumer: usize, region: u32, bytes: &[u8]) -> Result<(), Fault> {
        let expected = self.values.get(consumer).and_then(|rank| rank.get(region as usize));
        let Some(expected) = expected.filter(|expected| expected.len() == bytes.len()) else {
            return Err(Fault::Bytes(format!(
                "consumer {consumer} has no region {region} of {} bytes",
                bytes.len()
            )));
        };
        let mut both = expected.iter().zip(bytes).enumerate();
        match both.find(|(_, (expected, seen))| expected != seen) {
            None => Ok(()),
            Some((offset, (expected, seen))) => {
                let layout = &self.scene.consumer.ranks[consumer];
                let element = describe(layout, region, offset as u64);
                Err(Fault::Bytes(format!(
                    "consumer {consumer} region {region} offset {offset} ({element}): \
                     expected {expected:#04x}, found {seen:#04x}"
                )))
            }
        }
    }

    fn fault(
        &self,
        (consumer, region, offset): (usize, usize, usize),
        expected: Byte,
        seen: Option<Byte>,
    ) -> Fault {
        let layout = &self.scene.consumer.ranks[consumer];
        let element = describe(layout, rank_number(region), offset as u64);
        let name = |byte: Byte| {
            let place = match byte.origin.origin() {
                None => "from nowhere".to_owned(),
                Some(Origin { rank, region, offset }) => {
                    let layout = self.scene.producer.ranks.get(rank as usize);
                    let element = layout.map_or_else(String::new, |l| describe(l, region, offset));
                    format!("from producer {rank} region {region} offset {offset} ({element})")
                }
            };
            format!("{:#04x} {place}, written {} times", byte.value, byte.writes)
        };
        let at = format!("consumer {consumer} region {region} offset {offset} ({element})");
        let seen = seen.map_or_else(|| "no such byte".into(), name);
        Fault::Bytes(format!("{at}: expected {}; found {seen}", name(expected)))
    }
}

/// Numbers in a scene are small.
pub(super) fn rank_number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX - 1)
}

fn contradiction(producer: usize, layout: &RankLayout, region: u32, offset: usize) -> Fault {
    Fault::Contradiction(format!(
        "producer {producer} region {region} offset {offset} would hold two elements of the request at once: {}",
        describe(layout, region, offset as u64)
    ))
}

fn canary(consumer: usize, layout: &RankLayout) -> PerByte<u8> {
    sizes(layout)
        .enumerate()
        .map(|(region, bytes)| noise(CONSUMER, consumer, region, bytes))
        .collect()
}

fn holding(layout: &RankLayout, key: TensorKey, head: u32) -> Option<&Tensor> {
    layout.tensors().iter().find(|tensor| {
        tensor.key() == key && !tensor.local_only && tensor.head_range().contains(&head)
    })
}

/// The one producer rank that gives `head` of `key` to `consumer`.
fn source(
    scene: &Scene,
    pairs: &[Pair],
    consumer: usize,
    key: TensorKey,
    head: u32,
) -> Result<usize, Fault> {
    let mut found = Vec::new();
    for pair in pairs.iter().filter(|pair| pair.consumer == consumer) {
        for share in &pair.shares {
            if share.key == key && share.first_head <= head && head < share.end_head {
                found.push(pair.producer);
            }
        }
    }
    match found[..] {
        [producer] => {
            debug_assert!(producer < scene.producer.ranks.len());
            Ok(producer)
        }
        _ => Err(Fault::Pairing(format!(
            "head {head} of {key} is given to consumer {consumer} by producers {found:?}, not by one"
        ))),
    }
}

/// Every share is held on both sides, and no pair is there twice.
fn check_shares(scene: &Scene, pairs: &[Pair]) -> Result<(), Fault> {
    let mut seen = BTreeSet::new();
    for pair in pairs {
        if !seen.insert((pair.producer, pair.consumer)) || pair.shares.is_empty() {
            return Err(Fault::Pairing(format!(
                "the pair {}, {} is empty or there twice",
                pair.producer, pair.consumer
            )));
        }
        let sides = [
            ("producer", pair.producer, &scene.producer.ranks),
            ("consumer", pair.consumer, &scene.consumer.ranks),
        ];
        for (side, rank, ranks) in sides {
            for share in &pair.shares {
                for head in share.first_head..share.end_head.max(share.first_head + 1) {
                    let layout = ranks.get(rank);
                    if layout.and_then(|layout| holding(layout, share.key, head)).is_none() {
                        return Err(Fault::Pairing(format!(
                            "{side} {rank} does not hold head {head} of {}",
                            share.key
                        )));
                    }
                }
            }
        }
    }
    Ok(())
}
