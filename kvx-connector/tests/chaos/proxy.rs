//! A proxy between engines' control channels that delays, holds back, loses, changes and cuts off.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// What is done to what passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    Fair,
    /// Nothing passes, and no connection ends by it: what was sent comes later.
    Partition,
    /// Each piece comes so much later.
    Delay(Duration),
    /// Some pieces are lost.
    Loss,
    /// Some pieces are cut in the middle, and the connection with them.
    Cut,
    /// In some pieces a bit is changed.
    Flip,
}

#[derive(Debug)]
struct Shared {
    upstream: Mutex<Option<SocketAddr>>,
    weather: Mutex<Weather>,
    stop: AtomicBool,
    seed: u64,
}

impl Shared {
    fn weather(&self) -> Weather {
        *self.weather.lock().unwrap()
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits while nothing passes.
    fn wait_for_passage(&self) {
        while self.weather() == Weather::Partition && !self.stops() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn start(seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (upstream, weather) = (Mutex::new(None), Mutex::new(Weather::Fair));
        let shared = Arc::new(Shared { upstream, weather, stop: AtomicBool::new(false), seed });
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || accept(&listener, &shared))
        };
        Self { address, shared, thread: Some(thread) }
    }

    /// Where it leads to.
    pub(crate) fn lead_to(&self, upstream: Option<SocketAddr>) {
        *self.shared.upstream.lock().unwrap() = upstream;
    }

    pub(crate) fn set(&self, weather: Weather) {
        *self.shared.weather.lock().unwrap() = weather;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes who accepts.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut connections = Vec::new();
    for number in 0.. {
        let Ok((stream, _)) = listener.accept() else { continue };
        if shared.stops() {
            break;
        }
        let shared = Arc::clone(shared);
        connections.push(std::thread::spawn(move || connect(stream, number, &shared)));
        connections.retain(|thread: &JoinHandle<()>| !thread.is_finished());
    }
    for thread in connections {
        thread.join().unwrap();
    }
}

fn connect(down: TcpStream, number: u64, shared: &Arc<Shared>) {
    shared.wait_for_passage();
    let Some(upstream) = *shared.upstream.lock().unwrap() else { return };
    // Nobody listens there any more: whoever dialled is hung up on.
    let Ok(up) = TcpStream::connect(upstream) else { return };
    let pumps = [(&down, &up), (&up, &down)].into_iter().zip(0..).map(|((from, to), which)| {
        let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        let shared = Arc::clone(shared);
        let chance = ChaCha8Rng::seed_from_u64(shared.seed ^ (2 * number + which));
        std::thread::spawn(move || {
            pump(&from, &to, chance, &shared);
            // Either may be closed already.
            let _closed = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        })
    });
    for pump in pumps.collect::<Vec<_>>() {
        pump.join().unwrap();
    }
}

fn pump(mut from: &TcpStream, mut to: &TcpStream, mut chance: ChaCha8Rng, shared: &Shared) {
    from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    to.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    to.set_nodelay(true).unwrap();
    let mut buffer = vec![0; 1 << 14];
    while !shared.stops() {
        let bytes = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) => return,
        };
        shared.wait_for_passage();
        let mut piece = &buffer[..bytes];
        let mut changed;
        match shared.weather() {
            Weather::Fair | Weather::Partition => {}
            Weather::Delay(time) => std::thread::sleep(time),
            Weather::Loss if chance.random_ratio(1, 4) => continue,
            Weather::Cut if chance.random_ratio(1, 4) => {
                let _cut = to.write_all(&piece[..bytes / 2]);
                return;
            }
            Weather::Flip if chance.random_ratio(1, 4) => {
                changed = piece.to_vec();
                let at = chance.random_range(0..bytes);
                changed[at] ^= 1 << chance.random_range(0..8);
                piece = &changed;
            }
            Weather::Loss | Weather::Cut | Weather::Flip => {}
        }
        if to.write_all(piece).is_err() {
            return;
        }
    }
}
