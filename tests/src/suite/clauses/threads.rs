//! Many threads on one backend.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Submit, TransferBackend};
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};

use super::Group;
use crate::suite::clause::{Breach, Clause, Point, Verdict, ensure, notes, writes};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Threads",
    about: "Any thread may call anything; each event is given to one caller.",
    clauses: &[
        Clause::new(
            "threads.submit_and_poll",
            Point::Settled,
            "Eight threads post and poll at once: every transfer settles once, with exact bytes.",
            &["events_lost_among_threads", "settled_twice"],
            submit_and_poll,
        )
        .needs(&[writes])
        .here_only(),
        Clause::new(
            "threads.whoever_polls",
            Point::Notified,
            "An event is given to whichever thread polls, and to one only.",
            &["events_only_for_their_poster", "given_to_every_poller"],
            whoever_polls,
        )
        .needs(&[writes, notes])
        .here_only(),
        Clause::new(
            "threads.peers_come_and_go",
            Point::Settled,
            "While seven threads post and poll, another meets and severs peers: nobody's transfers suffer (known failure 93: \
             sglang#28897).",
            &["meeting_loses_events"],
            peers_come_and_go,
        )
        .needs(&[writes, notes])
        .here_only(),
    ],
};

/// What several threads post to one peer, and what they were told.
struct Crowd {
    backend: Arc<dyn TransferBackend>,
    peer: PeerId,
    segments: Vec<PostedSegment>,
    /// Events by transfer: how many, and whether one was not done.
    settled: Mutex<BTreeMap<u64, (u32, bool)>>,
    count: AtomicUsize,
    stop: AtomicBool,
    /// When the last transfer settled, or was posted.
    last: Mutex<Instant>,
    patience: Duration,
}

impl Crowd {
    /// Posts the `index`th segment as soon as there is room, polling meanwhile.
    fn post(&self, index: usize) -> Result<(), String> {
        let (id, segments) = (TransferId(index as u64), &self.segments[index..=index]);
        loop {
            match self.backend.submit(id, self.peer, Mode::Write, segments, None) {
                Ok(Submit::Submitted) => {
                    self.moved();
                    return Ok(());
                }
                Ok(Submit::Done { .. }) => {
                    self.settled(id, true);
                    return Ok(());
                }
                Ok(Submit::Full) => self.poll()?,
                Err(error) => return Err(format!("a write failed: {error}")),
            }
        }
    }

    fn poll(&self) -> Result<(), String> {
        let mut events = Events::with_limit(4);
        self.backend.poll(&mut events);
        for event in events.drain() {
            if let Event::Settled { id, outcome } = event {
                self.settled(id, outcome.is_done());
            }
        }
        self.check_time()?;
        std::thread::yield_now();
        Ok(())
    }

    fn settled(&self, id: TransferId, done: bool) {
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = settled.entry(id.0).or_insert((0, true));
        entry.0 += 1;
        entry.1 &= done;
        drop(settled);
        self.count.fetch_add(1, SeqCst);
        self.moved();
    }

    /// Something moves: it is worth waiting.
    fn moved(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn check_time(&self) -> Result<(), String> {
        let still = self.last.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if self.stop.load(SeqCst) || still > self.patience {
            return Err(format!("nothing moves since {still:?}, or another thread failed"));
        }
        Ok(())
    }

    /// Posts every `of`th segment from `first`, then polls until all of everybody's have settled.
    fn take_part(&self, first: usize, of: usize) -> Result<(), String> {
        let result = (first..self.segments.len())
            .step_by(of)
            .try_for_each(|index| self.post(index))
            .and_then(|()| {
                while self.count.load(SeqCst) < self.segments.len() {
                    self.poll()?;
                }
                Ok(())
            });
        if result.is_err() {
            self.stop.store(true, SeqCst);
        }
        result
    }

    fn check(&self) -> Verdict {
        let settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..self.segments.len() as u64 {
            match settled.get(&index) {
                Some((1, true)) => {}
                Some((1, false)) => return Err(Breach::new(format!("write {index} is not done"))),
                Some((times, _)) => {
                    return Err(Breach::new(format!("write {index} settled {times} times")));
                }
                None => return Err(Breach::new(format!("write {index} did not settle"))),
            }
        }
        Ok(())
    }
}

fn crowd(world: &World, lane: &crate::suite::lane::Lane, count: u64) -> Verdict<Crowd> {
    let patience = world.pace().patience.max(Duration::from_secs(3));
    Ok(Crowd {
        backend: lane.pair.one.backend()?,
        peer: lane.pair.at_one,
        segments: (0..count).map(|i| lane.segment(i * 40, i * 40, 33)).collect(),
        settled: Mutex::default(),
        count: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        last: Mutex::new(Instant::now()),
        patience,
    })
}

/// Runs a task on each of several threads.
fn together(count: usize, task: impl Fn(usize) -> Result<(), String> + Sync) -> Verdict {
    let task = &task;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|index| scope.spawn(move || task(index))).collect();
        let mut verdict = Ok(());
        for (index, thread) in threads.into_iter().enumerate() {
            let result = thread.join().unwrap_or_else(|_| Err("panicked".into()));
            if let Err(what) = result {
                verdict = Err(Breach::new(format!("thread {index} of {count}: {what}")));
            }
        }
        verdict
    })
}

fn submit_and_poll(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 400 * 40)?;
    let crowd = crowd(world, &lane, 400)?;
    let verdict = together(8, |thread| crowd.take_part(thread, 8));
    crowd.check()?;
    verdict?;
    lane.apply(Mode::Write, &crowd.segments);
    lane.check("after eight threads wrote 400 times")
}

fn whoever_polls(world: &World) -> Verdict {
    const COUNT: usize = 60;
    let pair = world.pair()?;
    let lane = world.lane(&pair, 4096)?;
    let crowd = crowd(world, &lane, COUNT as u64)?;
    let posted = AtomicUsize::new(0);
    let result = together(4, |thread| {
        if thread == 0 {
            // One thread posts, and never polls; the others poll.
            for (index, segment) in crowd.segments.iter().enumerate() {
                let id = TransferId(index as u64);
                loop {
                    let post = crowd.backend.submit(
                        id,
                        crowd.peer,
                        Mode::Write,
                        std::slice::from_ref(segment),
                        None,
                    );
                    match post {
                        Ok(Submit::Submitted) => break,
                        Ok(Submit::Done { .. }) => {
                            crowd.settled(id, true);
                            break;
                        }
                        Ok(Submit::Full) => crowd.check_time()?,
                        Err(error) => return Err(format!("a write failed: {error}")),
                    }
                }
                posted.fetch_add(1, SeqCst);
                crowd.moved();
            }
            return Ok(());
        }
        while crowd.count.load(SeqCst) < COUNT {
            crowd.poll()?;
        }
        // Once more, for what should not come.
        for _ in 0..50 {
            crowd.poll()?;
        }
        Ok(())
    });
    crowd.check()?;
    result?;
    ensure!(posted.load(SeqCst) == COUNT, "not everything was posted");
    Ok(())
}

fn peers_come_and_go(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 300 * 40)?;
    let crowd = crowd(world, &lane, 300)?;
    let guests = [world.open_here("third")?.backend()?, world.open_here("fourth")?.backend()?];
    let verdict = together(8, |thread| {
        if thread > 0 {
            return crowd.take_part(thread - 1, 7);
        }
        for round in 0..12 {
            let guest = &guests[round % 2];
            let met = visit(&*crowd.backend, &**guest);
            met.map_err(|error| format!("meeting or severing a peer failed: {error}"))?;
            std::thread::yield_now();
        }
        Ok(())
    });
    crowd.check()?;
    verdict?;
    lane.apply(Mode::Write, &crowd.segments);
    lane.check("after peers came and went")?;
    pair.one.peer_info(pair.at_one).map(|_| ())
}

/// A guest offers, is met, and is severed by the host. What the guest is told, it polls.
fn visit(host: &dyn TransferBackend, guest: &dyn TransferBackend) -> kvx_core::Result<()> {
    let (at_host, reply) = host.accept(&guest.offer()?)?;
    let (at_guest, completion) = guest.complete(&reply)?;
    host.finish(&completion)?;
    host.sever(at_host)?;
    // It may have been told already, so that there is nothing left to sever.
    let _ = guest.sever(at_guest);
    let mut events = Events::with_limit(16);
    for _ in 0..20 {
        guest.poll(&mut events);
        events.drain().for_each(drop);
    }
    Ok(())
}
