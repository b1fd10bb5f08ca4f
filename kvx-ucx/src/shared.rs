//! What the backend and its thread share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::Result;
use kvx_core::capability::Capabilities;
use kvx_core::id::Incarnation;
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::config::Options;
use crate::core::{Attention, Core};
use crate::door::Door;
use crate::error::{refused, system};
use crate::message::Kind;
use crate::opening::{context, warn, worker};
use crate::probe::capabilities;
use crate::sys::{Context, Failure, Library, before_destructors};

/// How long the thread waits for a program that was woken with it.
const HEAD_START: Duration = Duration::from_micros(20);

pub(crate) struct Shared {
    pub(crate) incarnation: [u8; 16],
    /// Of the worker.
    pub(crate) address: Vec<u8>,
    pub(crate) options: Options,
    pub(crate) capabilities: Capabilities,
    pub(crate) context: Arc<Context>,
    core: Mutex<Core>,
    /// Threads that wait for the lock. The progress thread lets them go first.
    wanting: AtomicU32,
    pub(crate) wake: OwnedFd,
    /// Readable while there are events.
    signal: OwnedFd,
    /// Readable while that is, or while something comes to the worker and the [door](crate::door) is open: what a program sleeps on.
    pub(crate) ready: OwnedFd,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a backend's messages to its peers carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Active messages that were sent.
    pub messages: u64,
    /// Bytes in them beside their headers.
    pub message_bytes: u64,
    /// Of these, bytes of notifications.
    pub notification_bytes: u64,
    /// Of these, bytes of lists of ranges, and of what answers them. The rest acknowledges notifications: none is data of a
    /// transfer.
    pub list_bytes: u64,
}

impl Counters {
    pub(crate) const fn count(&mut self, kind: Kind, bytes: usize) {
        self.messages += 1;
        self.message_bytes += bytes as u64;
        match kind {
            Kind::Note => self.notification_bytes += bytes as u64,
            Kind::Ask | Kind::Offer | Kind::Landed | Kind::Refused => self.list_bytes += bytes as u64,
            Kind::Taken | Kind::Hello | Kind::Bye => {}
        }
    }
}

/// A number that nobody can guess.
pub(crate) fn random() -> Result<u64> {
    let random = Incarnation::random()?;
    Ok(u64::from_le_bytes(*random.as_bytes().first_chunk().unwrap_or(&[0; 8])))
}

/// Backends whose threads may be at work.
static LIVE: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Lets no thread call UCX any more: the process ends, and UCX takes itself apart.
fn freeze() {
    let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    for shared in live.iter().filter_map(Weak::upgrade) {
        std::mem::forget(shared.lock());
        // Nor is anything of it dropped by this thread.
        std::mem::forget(shared);
    }
}

impl Shared {
    /// From now on its thread is stopped when the process ends.
    pub(crate) fn watch(self: &Arc<Self>) {
        before_destructors(freeze);
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|known| known.strong_count() > 0);
        live.push(Arc::downgrade(self));
    }

    pub(crate) fn new(options: &Options) -> Result<Self> {
        let failed = |error: rustix::io::Errno| system("open", "a descriptor cannot be had", error.into());
        let context = Arc::new(context(options)?);
        let library: &'static Library = context.library();
        let worker = worker(&context, options)?;
        warn(&context, &worker, options);
        let address = worker.address().map_err(|failure: Failure| refused(library, &failure))?;
        let descriptor = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed);
        let (signal, ready) = (descriptor()?, epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?);
        epoll::add(&ready, &signal, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(failed)?;
        let door = ready.try_clone().map_err(|error| system("open", "a descriptor cannot be had", error))?;
        Ok(Self {
            incarnation: *Incarnation::random()?.as_bytes(),
            address,
            options: options.clone(),
            capabilities: capabilities(&context),
            core: Mutex::new(Core::new(options.clone(), library, worker, Door::new(door))),
            context,
            wanting: AtomicU32::new(0),
            wake: descriptor()?,
            signal,
            ready,
            thread: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks, and calls nothing of UCX's.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&mut Core) -> R) -> R {
        self.wanting.fetch_add(1, Relaxed);
        let mut core = self.lock();
        self.wanting.fetch_sub(1, Relaxed);
        look(&mut core)
    }

    /// Acts, and leaves nothing undone of which nobody would hear: the thread is woken if it must.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> R {
        self.wanting.fetch_add(1, Relaxed);
        let mut core = self.lock();
        self.wanting.fetch_sub(1, Relaxed);
        let result = act(&mut core);
        core.settle();
        let timed = std::mem::take(&mut core.timed);
        let wake = core.asleep && (timed || (core.touched && !core.is_attended() && !core.arm()));
        if wake {
            core.asleep = false;
        }
        self.leave(core);
        if wake {
            self.wake();
        }
        result
    }

    /// As [`with`](Self::with), for the thread: it sees itself to what is left.
    pub(crate) fn with_thread<R>(&self, act: impl FnOnce(&mut Core) -> R) -> R {
        let mut patience = 200;
        while self.wanting.load(Relaxed) > 0 && patience > 0 {
            std::thread::yield_now();
            patience -= 1;
        }
        let mut core = self.lock();
        let result = act(&mut core);
        self.leave(core);
        result
    }

    /// Whether a program that polls without pause goes on doing so: it has just polled, or is in a call.
    pub(crate) fn is_attended(&self, attention: &Attention) -> bool {
        attention.is_paid() || matches!(self.core.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// A program that sleeps on the descriptor was woken, too: it goes first, if it comes.
    pub(crate) fn lets_first(&self, attention: &Attention) {
        let (begun, before) = (Instant::now(), attention.last());
        while begun.elapsed() < HEAD_START
            && attention.last() == before
            && self.wanting.load(Relaxed) == 0
        {
            std::thread::yield_now();
        }
    }

    /// Tells those who wait.
    fn leave(&self, mut core: MutexGuard<'_, Core>) {
        self.signal(&mut core);
        let wakers = if std::mem::take(&mut core.stirred) { std::mem::take(&mut core.wakers) } else { Vec::new() };
        drop(core);
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    /// Makes the descriptor readable while there are events, and only then.
    fn signal(&self, core: &mut Core) {
        let any = !core.events.is_empty();
        if any != core.signalled {
            core.signalled = any;
            if any {
                core.door.rings();
            }
            // Neither can fail: the counter is 0 or 1.
            let _ = if any {
                rustix::io::write(&self.signal, &1_u64.to_ne_bytes())
            } else {
                rustix::io::read(&self.signal, &mut [0; 8])
            };
        }
    }

    /// The thread is to look at everything.
    pub(crate) fn wake(&self) {
        // It can fail only where its counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Ends everything, and waits for nothing.
    pub(crate) fn shut(&self) {
        let regions = self.with(|core| {
            core.closed = true;
            for peer in core.peers.handles().collect::<Vec<_>>() {
                core.end(peer, None);
            }
            core.regions.drain()
        });
        // What is in flight holds what it needs. Their owners may have something to do, with which the lock has nothing to do.
        drop(regions);
        self.wake();
    }
}
