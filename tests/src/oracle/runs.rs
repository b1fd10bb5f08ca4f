//! The fewest segments that do the work.

use kvx_core::capability::Limits;
use kvx_core::transfer::{Mode, Segment};

use super::expect::{Oracle, Origin, rank_number};
use super::fault::Fault;

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// Region of the consumer's layout.
    pub to_region: u32,
    /// Offset in it, in bytes.
    pub to_offset: u64,
    /// Region of the producer's layout.
    pub from_region: u32,
    /// Offset in it, in bytes.
    pub from_offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Run {
    /// The run that a segment moves.
    #[must_use]
    pub const fn of(segment: &Segment, mode: Mode) -> Self {
        let Segment { local_region, remote_region, local_offset, remote_offset, bytes } = *segment;
        match mode {
            Mode::Read => Self {
                to_region: local_region,
                to_offset: local_offset,
                from_region: remote_region,
                from_offset: remote_offset,
                bytes,
            },
            Mode::Write => Self {
                to_region: remote_region,
                to_offset: remote_offset,
                from_region: local_region,
                from_offset: local_offset,
                bytes,
            },
        }
    }
}

impl Oracle<'_> {
    /// The fewest runs that do what `producer` must do for `consumer`, sorted by where they are written.
    ///
    /// Bytes can be in one segment only if they are neighbours in the same regions on both sides, so no list is shorter than
    /// that of the longest such runs, and there is only one such list.
    #[must_use]
    pub fn fewest(&self, producer: usize, consumer: usize) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let Some(regions) = self.wanted.get(consumer) else { return runs };
        for (to_region, cells) in regions.iter().enumerate() {
            let mut open = false;
            for (to_offset, cell) in cells.iter().enumerate() {
                let origin = cell.origin().filter(|origin| origin.rank == rank_number(producer));
                let Some(Origin { region, offset, .. }) = origin else {
                    open = false;
                    continue;
                };
                match runs.last_mut() {
                    Some(run)
                        if open
                            && run.from_region == region
                            && run.from_offset + run.bytes == offset =>
                    {
                        run.bytes += 1;
                    }
                    _ => runs.push(Run {
                        to_region: rank_number(to_region),
                        to_offset: to_offset as u64,
                        from_region: region,
                        from_offset: offset,
                        bytes: 1,
                    }),
                }
                open = true;
            }
        }
        runs
    }

    /// Checks that `segments`, listed without limits, are the fewest, sorted by where they are written.
    ///
    /// # Errors
    ///
    /// [`Fault::Segments`], naming the first that differs.
    pub fn check_fewest(
        &self,
        producer: usize,
        consumer: usize,
        mode: Mode,
        segments: &[Segment],
    ) -> Result<(), Fault> {
        let fewest = self.fewest(producer, consumer);
        for (number, segment) in segments.iter().enumerate() {
            let (seen, wanted) = (Run::of(segment, mode), fewest.get(number));
            if wanted != Some(&seen) {
                return Err(Fault::Segments(format!(
                    "producer {producer}, consumer {consumer}: segment {number} of {} is {seen:?}; \
                     in the list of the fewest, {}, it is {wanted:?}",
                    segments.len(),
                    fewest.len()
                )));
            }
        }
        if segments.len() == fewest.len() {
            return Ok(());
        }
        Err(Fault::Segments(format!(
            "producer {producer}, consumer {consumer}: {} segments, {} are missing at the end",
            segments.len(),
            fewest.len() - segments.len()
        )))
    }
}

/// Checks that `cut` is `whole` with its long segments cut into the fewest pieces that `limits` allow.
///
/// # Errors
///
/// [`Fault::Segments`], naming the first that differs.
pub(crate) fn check_cut(whole: &[Segment], cut: &[Segment], limits: &Limits) -> Result<(), Fault> {
    let most = limits.max_segment_bytes;
    let mut rest = cut.iter();
    for segment in whole {
        let mut done = 0;
        let mut pieces = 0;
        while done < segment.bytes {
            let Some(piece) = rest.next() else {
                return Err(Fault::Segments(format!("the cut list ends within {segment:?}")));
            };
            let bytes = piece.bytes;
            let expected = Segment {
                local_offset: segment.local_offset + done,
                remote_offset: segment.remote_offset + done,
                bytes,
                ..*segment
            };
            if *piece != expected || bytes == 0 || bytes > most || bytes > segment.bytes - done {
                return Err(Fault::Segments(format!(
                    "{piece:?} is not a piece of {segment:?} at {done} of at most {most} bytes"
                )));
            }
            done += bytes;
            pieces += 1;
        }
        if pieces != segment.bytes.div_ceil(most) {
            return Err(Fault::Segments(format!(
                "{segment:?} is cut into {pieces} pieces of at most {most} bytes"
            )));
        }
    }
    match rest.next() {
        None => Ok(()),
        Some(piece) => Err(Fault::Segments(format!("{piece:?} is a piece of nothing"))),
    }
}
