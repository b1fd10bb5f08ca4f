//! The backend `ucx` beside a loop over UCX of its own, in turns: the same buffers, segments and window, by the same options.
//!
//! `cargo bench -p kvx-benches --bench ucx -- OPTIONS...`, where each OPTIONS is as for the backend (`tls=tcp`); none given, those
//! of `SETUPS`. Both sides are in this process, and poll without pause. A ratio is the median over rounds of the loop's time by
//! the backend's. `--rounds=N`: so many.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn main() {}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn main() -> kvx_core::Result<()> {
    let (flags, wanted): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|text| text.starts_with("--"));
    // Once each, to see that it runs.
    let once = flags.iter().any(|flag| flag == "--test");
    let rounds = flags.iter().find_map(|flag| flag.strip_prefix("--rounds=")?.parse().ok());
    let rounds = if once { 1 } else { rounds.unwrap_or(ucx::ROUNDS) };
    let setups = ucx::SETUPS.iter().map(|text| (*text).to_owned());
    let setups = if wanted.is_empty() { setups.collect() } else { wanted };
    setups.iter().try_for_each(|options| ucx::measure(options, rounds))
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod ucx {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use kvx_core::backend::{Event, Events, Submit, TransferBackend as _};
    use kvx_core::handshake::Handshake as _;
    use kvx_core::id::{PeerId, TransferId};
    use kvx_core::memory::{MemoryRegistry as _, Region};
    use kvx_core::transfer::{Mode, PostedSegment, Segment};
    use kvx_core::{Error, ErrorKind, Result};
    use kvx_ucx::limit::Raw;
    use kvx_ucx::{Options, UcxBackend};

    pub(super) const SETUPS: &[&str] =
        &["tls=tcp", "", "ucx.MM_ERROR_HANDLING=y", "ucx.CMA_MEMORY_INVALIDATE=y"];

    /// Llama 3.1 8B: 32 layers, keys and values; blocks of 16 tokens, of which 2,048 tokens are 128.
    const REGIONS: u32 = 64;
    const BLOCKS: u64 = 128;
    const BLOCK: u64 = 32 << 10;

    pub(super) const ROUNDS: usize = 9;
    const SMALL_ROUNDS: usize = 1000;

    /// Every block of every region, permuted.
    fn segments() -> Vec<Segment> {
        let blocks = (0..REGIONS).flat_map(|region| (0..BLOCKS).map(move |at| (region, at)));
        let segments = blocks.map(|(region, at)| Segment {
            local_region: region,
            remote_region: region,
            local_offset: at * 37 % BLOCKS * BLOCK,
            remote_offset: at * 53 % BLOCKS * BLOCK,
            bytes: BLOCK,
        });
        segments.collect()
    }

    fn memory(fill: u8) -> Result<Vec<Region>> {
        let filled = |_| {
            let region = Region::host(BLOCKS * BLOCK)?;
            let page = [fill; 4096];
            for at in (0..region.bytes()).step_by(page.len()) {
                region.write_at(at, &page)?;
            }
            Ok(region)
        };
        (0..REGIONS).map(filled).collect()
    }

    /// The other side's thread, which polls without pause while it is told to.
    struct Spinner {
        spins: Arc<AtomicBool>,
        begin: mpsc::Sender<()>,
        thread: std::thread::JoinHandle<()>,
    }

    impl Spinner {
        fn new(mut poll: impl FnMut() + Send + 'static) -> Self {
            let spins = Arc::new(AtomicBool::new(false));
            let (begin, begun) = mpsc::channel();
            let flag = Arc::clone(&spins);
            let thread = std::thread::spawn(move || {
                while begun.recv().is_ok() {
                    while flag.load(Relaxed) {
                        poll();
                    }
                }
            });
            Self { spins, begin, thread }
        }

        /// How long each of so many runs took.
        fn times(
            &self,
            times: usize,
            mut run: impl FnMut() -> Result<()>,
        ) -> Result<Vec<Duration>> {
            self.spins.store(true, Relaxed);
            // It is there until the end.
            let _ = self.begin.send(());
            let once = |_| {
                let begun = Instant::now();
                run()?;
                Ok(begun.elapsed())
            };
            let all = (0..times).map(once).collect();
            self.spins.store(false, Relaxed);
            all
        }

        fn end(self) {
            drop(self.begin);
            // It has nothing to say.
            let _ = self.thread.join();
        }
    }

    /// The loop over UCX.
    struct Loop {
        raw: Raw,
        window: u32,
        other: Spinner,
    }

    impl Loop {
        fn new(options: &Options, mine: &[Region], theirs: &[Region]) -> Result<Self> {
            let (mut raw, mut other) = (Raw::open(options)?, Raw::open(options)?);
            mine.iter().try_for_each(|region| raw.register(region).map(drop))?;
            let keys: Vec<_> =
                theirs.iter().map(|region| other.register(region)).collect::<Result<_>>()?;
            raw.connect(&other.address()?, &keys)?;
            Ok(Self { raw, window: options.window, other: Spinner::new(move || other.progress()) })
        }

        fn times(
            &mut self,
            mode: Mode,
            segments: &[Segment],
            times: usize,
        ) -> Result<Vec<Duration>> {
            self.other.times(times, || self.raw.run(mode, segments, self.window))
        }

        fn end(self) {
            drop(self.raw);
            self.other.end();
        }
    }

    /// Two backends that have met, and the segments as they know them.
    struct Pair {
        one: Arc<UcxBackend>,
        other: Option<Spinner>,
        peer: PeerId,
        segments: Vec<PostedSegment>,
        next: u64,
    }

    impl Pair {
        fn new(
            options: &Options,
            mine: &[Region],
            theirs: &[Region],
            segments: &[Segment],
        ) -> Result<Self> {
            let (one, other) = (UcxBackend::open(options)?, UcxBackend::open(options)?);
            let (_, reply) = other.accept(&one.offer()?)?;
            let (peer, completion) = one.complete(&reply)?;
            other.finish(&completion)?;
            let local: Vec<_> =
                mine.iter().map(|region| one.register(region)).collect::<Result<_>>()?;
            let key =
                |region: &Region| one.import_key(peer, &other.key_blob(other.register(region)?)?);
            let remote: Vec<_> = theirs.iter().map(key).collect::<Result<_>>()?;
            let posted = segments.iter().map(|segment| PostedSegment {
                local: local[segment.local_region as usize],
                remote: remote[segment.remote_region as usize],
                local_offset: segment.local_offset,
                remote_offset: segment.remote_offset,
                bytes: segment.bytes,
            });
            let mut events = Events::with_limit(64);
            let other = Spinner::new(move || {
                other.poll(&mut events);
                events.drain().for_each(drop);
            });
            Ok(Self { segments: posted.collect(), one, other: Some(other), peer, next: 0 })
        }

        /// Moves the first so many segments once. Polls without pause.
        fn run(&mut self, mode: Mode, count: usize) -> Result<()> {
            let most = self.one.capabilities().limits.max_batch_segments as usize;
            let mut batches = self.segments[..count].chunks(most).peekable();
            let (mut left, mut events) = (0, Events::with_limit(64));
            while left > 0 || batches.peek().is_some() {
                while let Some(batch) = batches.peek() {
                    match self.one.submit(TransferId(self.next), self.peer, mode, batch, None)? {
                        Submit::Full => break,
                        Submit::Submitted => left += 1,
                        _ => {}
                    }
                    self.next += 1;
                    batches.next();
                }
                self.one.poll(&mut events);
                for event in events.drain() {
                    match event {
                        Event::Settled { outcome, .. } if outcome.is_done() => left -= 1,
                        event => {
                            return Err(Error::new(
                                ErrorKind::Fabric,
                                "bench",
                                format!("{event:?}"),
                            ));
                        }
                    }
                }
            }
            Ok(())
        }

        fn times(&mut self, mode: Mode, count: usize, times: usize) -> Result<Vec<Duration>> {
            // It is there but for the length of this call.
            let other = self.other.take();
            let all = other.as_ref().map(|other| other.times(times, || self.run(mode, count)));
            self.other = other;
            all.unwrap_or_else(|| Ok(Vec::new()))
        }

        fn end(self) {
            self.other.into_iter().for_each(Spinner::end);
        }
    }

    fn median(mut all: Vec<f64>) -> f64 {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }

    fn seconds(times: Vec<Duration>) -> f64 {
        median(times.iter().map(Duration::as_secs_f64).collect())
    }

    #[expect(clippy::print_stdout, clippy::cast_precision_loss, reason = "a table for people")]
    pub(super) fn measure(text: &str, rounds: usize) -> Result<()> {
        let options = Options::read(&text.parse()?)?;
        let small_rounds = if rounds == 1 { 1 } else { SMALL_ROUNDS };
        match Raw::open(&options) {
            Err(error) if [ErrorKind::Unsupported, ErrorKind::Config].contains(&error.kind()) => {
                println!("{text:>28} not measured: {error}");
                return Ok(());
            }
            other => drop(other?),
        }
        let (mine, theirs, all) = (memory(1)?, memory(2)?, segments());
        let mut raw = Loop::new(&options, &mine, &theirs)?;
        let mut pair = Pair::new(&options, &mine, &theirs, &all)?;
        let bytes = (all.len() as u64 * BLOCK) as f64;
        for mode in [Mode::Read, Mode::Write] {
            raw.times(mode, &all, 1)?;
            pair.times(mode, all.len(), 1)?;
            let (mut loops, mut pairs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..rounds {
                let mut one = || raw.times(mode, &all, 1).map(seconds);
                let mut other = || pair.times(mode, all.len(), 1).map(seconds);
                let (one, other) = if round % 2 == 0 {
                    (one()?, other()?)
                } else {
                    let other = other()?;
                    (one()?, other)
                };
                loops.push(one);
                pairs.push(other);
                ratios.push(one / other);
            }
            println!(
                "{text:>28} {mode:>5}, 256 MiB: {:.2} GB/s of {:.2}: {:.3} ({})",
                bytes / median(pairs) / 1e9,
                bytes / median(loops) / 1e9,
                median(ratios),
                pair.one.peer_info(pair.peer)?.transport,
            );
        }
        for mode in [Mode::Read, Mode::Write] {
            let one = seconds(raw.times(mode, &all[..1], small_rounds)?) * 1e6;
            let other = seconds(pair.times(mode, 1, small_rounds)?) * 1e6;
            println!("{text:>28} {mode:>5}, one block: {other:.1} us; the loop {one:.1} us");
        }
        raw.end();
        pair.end();
        Ok(())
    }
}
