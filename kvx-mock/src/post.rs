//! From a batch of segments to work for the fabric.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::Result;
use kvx_core::backend::Submit;
use kvx_core::capability::{Capabilities, Limits};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};
use rand::seq::SliceRandom;

use crate::engine::{Engine, Job, PeerState, Stage, Transfer, Wait, Work};
use crate::error::{BACKEND, down, misuse, over, ruled, stale};
use crate::net::{EngineId, Net};
use crate::rule::{Kind, Party, Verdict};
use crate::schedule::Lane;
use crate::trace::What;

const SUBMIT: &str = "submit";

impl Net {
    pub(crate) fn submit(
        &mut self,
        engine: EngineId,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let entry = self.engine(SUBMIT, engine)?;
        entry.check_open(SUBMIT)?;
        let side = entry.peer(SUBMIT, peer)?;
        if side.state != PeerState::Open {
            return Err(down(SUBMIT, "the connection is over").with_context("peer", peer));
        }
        if !side.ready {
            return Err(misuse(SUBMIT, "the handshake with this peer is not complete"));
        }
        check(entry.preset.capabilities(), mode, segments, notify)?;
        if entry.in_flight.contains_key(&id) {
            return Err(misuse(SUBMIT, "a transfer of this id is in flight").with_context("id", id));
        }
        if side.in_flight >= entry.preset.capabilities().limits.max_in_flight {
            self.record(engine, What::Full(peer));
            return Ok(Submit::Full);
        }
        let mut work = entry.work(peer, segments)?;
        let bytes = segments.iter().fold(0_u64, |sum, s| sum.saturating_add(s.bytes));
        let to = Party { name: Arc::clone(&side.name), incarnation: side.incarnation };
        let to = (side.engine, to);
        match self.ask(Kind::Post, engine, to, Some(id), Some(mode), bytes) {
            Some((_, (Verdict::Fail(kind), _))) => return Err(ruled(SUBMIT, kind)),
            Some((_, (Verdict::Full, _))) => {
                self.record(engine, What::Full(peer));
                return Ok(Submit::Full);
            }
            _ => {}
        }
        work.jobs.shuffle(&mut self.rng);
        let (lane, number, posted_at) = (Lane { engine, peer }, self.number(), self.schedule.now);
        let entry = self.engine_mut(SUBMIT, engine)?;
        entry.in_flight.insert(id, peer);
        if let Some(side) = entry.peers.get_mut(peer) {
            let notify = notify.map(Vec::from);
            let transfer = Transfer {
                id,
                mode,
                work,
                bytes,
                notify,
                posted_at,
                cancelled: false,
                doomed: None,
                stage: Stage::Data,
                wait: Wait::Turn,
                judged: false,
            };
            side.transfers.insert(number, transfer);
            side.in_flight += 1;
        }
        let (segments, notify) = (segments.len(), notify.map(<[u8]>::len));
        self.record(engine, What::Submitted { id, peer, mode, segments, notify });
        if segments == 0 {
            self.all_arrived(lane, number);
        } else {
            self.begin(lane, number);
        }
        Ok(Submit::Submitted)
    }

    pub(crate) fn cancel(&mut self, engine: EngineId, id: TransferId) -> Result<()> {
        let operation = "cancel";
        let entry = self.engine_mut(operation, engine)?;
        let Some(peer) = entry.in_flight.get(&id).copied() else {
            return Err(stale(operation, "transfer", id));
        };
        if let Some(side) = entry.peers.get_mut(peer) {
            for transfer in side.transfers.values_mut().filter(|transfer| transfer.id == id) {
                transfer.cancelled = true;
            }
        }
        self.record(engine, What::Cancelled(id));
        Ok(())
    }
}

/// What a port would have refused or split: the fabric is strict, so that a port that does not is found out.
pub(crate) fn check(
    capabilities: &Capabilities,
    mode: Mode,
    segments: &[PostedSegment],
    notify: Option<&[u8]>,
) -> Result<()> {
    let Limits { max_segment_bytes, max_batch_segments, max_notification_bytes, .. } =
        capabilities.limits;
    if !capabilities.mode(mode) {
        return Err(kvx_core::Error::unsupported(SUBMIT, format!("no transfers of mode {mode}"))
            .with_backend(BACKEND));
    }
    if segments.is_empty() && notify.is_none() {
        return Err(misuse(SUBMIT, "neither segments nor a notification"));
    }
    if segments.len() > max_batch_segments as usize {
        return Err(over(SUBMIT, "too many segments", segments.len(), max_batch_segments));
    }
    if let Some(bytes) = notify.map(<[u8]>::len).filter(|n| *n > max_notification_bytes as usize) {
        return Err(over(SUBMIT, "the notification is too long", bytes, max_notification_bytes));
    }
    if segments.iter().any(|segment| segment.bytes == 0) {
        return Err(misuse(SUBMIT, "a segment of zero bytes"));
    }
    if let Some(large) = segments.iter().find(|segment| segment.bytes > max_segment_bytes) {
        return Err(over(SUBMIT, "a segment is too large", large.bytes, max_segment_bytes));
    }
    Ok(())
}

impl Engine {
    /// Looks up every handle of a batch once.
    fn work(&self, peer: PeerId, segments: &[PostedSegment]) -> Result<Work> {
        let mut work = Work { jobs: Vec::with_capacity(segments.len()), ..Work::default() };
        let mut locals: BTreeMap<RegionId, usize> = BTreeMap::new();
        let mut remotes: BTreeMap<RemoteRegionId, usize> = BTreeMap::new();
        let mut last: Option<(PostedSegment, Job)> = None;
        for segment in segments {
            let (local, remote) = match &last {
                Some((before, job))
                    if before.local == segment.local && before.remote == segment.remote =>
                {
                    (job.local, job.remote)
                }
                _ => (
                    self.local_index(&mut locals, &mut work, segment.local)?,
                    self.remote_index(&mut remotes, &mut work, peer, segment.remote)?,
                ),
            };
            let PostedSegment { local_offset, remote_offset, bytes, .. } = *segment;
            let job = Job { local, remote, local_offset, remote_offset, bytes };
            work.jobs.push(job);
            last = Some((*segment, job));
        }
        Ok(work)
    }

    fn local_index(
        &self,
        known: &mut BTreeMap<RegionId, usize>,
        work: &mut Work,
        handle: RegionId,
    ) -> Result<usize> {
        if let Some(index) = known.get(&handle) {
            return Ok(*index);
        }
        let registered =
            self.regions.get(handle).ok_or_else(|| stale(SUBMIT, "local region", handle))?;
        known.insert(handle, work.locals.len());
        work.locals.push((handle, registered.region.clone()));
        Ok(work.locals.len() - 1)
    }

    fn remote_index(
        &self,
        known: &mut BTreeMap<RemoteRegionId, usize>,
        work: &mut Work,
        peer: PeerId,
        handle: RemoteRegionId,
    ) -> Result<usize> {
        if let Some(index) = known.get(&handle) {
            return Ok(*index);
        }
        let imported = self.keys.get(handle).filter(|imported| imported.peer == peer);
        let imported = imported.ok_or_else(|| stale(SUBMIT, "remote region", handle))?;
        known.insert(handle, work.remotes.len());
        work.remotes.push((handle, imported.key));
        Ok(work.remotes.len() - 1)
    }
}
