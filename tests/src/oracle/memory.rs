//! The memory of all ranks, and what was done to it.

use kvx_core::transfer::{Mode, Segment};

use super::expect::{Byte, Cell, Origin, PerByte, index, rank_number};
use super::fault::Fault;

/// Real bytes for all ranks of a scene, with the history of every byte of the consumers: see
/// [`Oracle::memory`](super::Oracle::memory).
#[derive(Clone)]
pub struct Memory {
    producers: Vec<PerByte<u8>>,
    consumers: Vec<PerByte<u8>>,
    origins: Vec<PerByte<Cell>>,
    writes: Vec<PerByte<u8>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("producers", &self.producers.len())
            .field("consumers", &self.consumers.len())
            .finish_non_exhaustive()
    }
}

impl Memory {
    pub(super) fn new(producers: Vec<PerByte<u8>>, consumers: Vec<PerByte<u8>>) -> Self {
        fn like<T>(ranks: &[PerByte<u8>], region: impl Fn(usize) -> Vec<T>) -> Vec<PerByte<T>> {
            let regions = |rank: &PerByte<u8>| rank.iter().map(|r| region(r.len())).collect();
            ranks.iter().map(regions).collect()
        }
        let origins = like(&consumers, |bytes| vec![Cell::NONE; bytes]);
        let writes = like(&consumers, |bytes| vec![0; bytes]);
        Self { producers, consumers, origins, writes }
    }

    /// Bytes of a region of a producer rank.
    #[must_use]
    pub fn producer(&self, rank: usize, region: usize) -> Option<&[u8]> {
        self.producers.get(rank)?.get(region).map(Vec::as_slice)
    }

    /// Bytes of a region of a consumer rank.
    #[must_use]
    pub fn consumer(&self, rank: usize, region: usize) -> Option<&[u8]> {
        self.consumers.get(rank)?.get(region).map(Vec::as_slice)
    }

    pub(super) fn byte(&self, rank: usize, region: usize, offset: usize) -> Option<Byte> {
        let value = *self.consumers.get(rank)?.get(region)?.get(offset)?;
        let (origin, writes) =
            (self.origins[rank][region][offset], self.writes[rank][region][offset]);
        Some(Byte { value, origin, writes })
    }

    /// Carries out segments between two ranks, one byte at a time: those that the consumer would read or the producer would
    /// write.
    ///
    /// # Errors
    ///
    /// [`Fault::Segments`] for a segment of no bytes or outside of its regions.
    pub fn apply(
        &mut self,
        producer: usize,
        consumer: usize,
        mode: Mode,
        segments: &[Segment],
    ) -> Result<(), Fault> {
        for segment in segments {
            let local = (segment.local_region, segment.local_offset);
            let remote = (segment.remote_region, segment.remote_offset);
            let (to, from) = match mode {
                Mode::Read => (local, remote),
                Mode::Write => (remote, local),
            };
            if segment.bytes == 0 {
                return Err(Fault::Segments(format!("{segment:?} has no bytes")));
            }
            for byte in 0..segment.bytes {
                self.copy((producer, from.0, from.1 + byte), (consumer, to.0, to.1 + byte))
                    .ok_or_else(|| {
                        Fault::Segments(format!(
                            "byte {byte} of {segment:?} ({mode}) is outside of its regions \
                             (producer {producer}, consumer {consumer})"
                        ))
                    })?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, from: (usize, u32, u64), to: (usize, u32, u64)) -> Option<()> {
        let value = *self.producers.get(from.0)?.get(from.1 as usize)?.get(index(from.2))?;
        let (region, offset) = (to.1 as usize, index(to.2));
        *self.consumers.get_mut(to.0)?.get_mut(region)?.get_mut(offset)? = value;
        let origin = Origin { rank: rank_number(from.0), region: from.1, offset: from.2 };
        self.origins[to.0][region][offset] = Cell::new(origin);
        let writes = &mut self.writes[to.0][region][offset];
        *writes = writes.saturating_add(1);
        Some(())
    }
}
