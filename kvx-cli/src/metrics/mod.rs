//! What a command that runs for long shows of itself, over HTTP: its metrics for Prometheus, its status for `kvx top`.
//!
//! [`serve`] goes before the engines are started: what is counted is fixed on whoever records when an engine starts.
//!
//! | path | what |
//! |---|---|
//! | `/metrics` | all metrics, in Prometheus's text format: see `docs/metrics.md` |
//! | `/status` | what [`Guard::show`] was given, as JSON |
//!
//! Whoever reaches the address may read both, and nothing can be changed by either. There is no key and no cache's content in them,
//! but names and addresses of engines: so the address is on loopback, unless a host is named. Requests are bounded in size, number
//! and time; one thread (`kvx-metrics`) serves all of them.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvx_connector::observe::EngineStatus;
use kvx_core::{Error, ErrorKind, Result};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

mod http;
#[cfg(test)]
mod tests;

/// Upper bounds of the buckets of times, in seconds: from ten microseconds to a minute.
const SECONDS: &[f64] = &[
    0.000_01, 0.000_03, 0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
    60.0,
];

/// Upper bounds of the buckets of sizes, in bytes: from 4 KiB to 16 GiB.
const BYTES: &[f64] = &[
    4_096.0,
    65_536.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
    17_179_869_184.0,
];

/// How often what was recorded is put into buckets, also where nobody asks.
const UPKEEP: Duration = Duration::from_secs(5);

/// What gives the status.
type Status = Box<dyn Fn() -> Vec<EngineStatus> + Send>;

/// What `/status` says.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Page {
    /// The version of kvx that says it.
    pub(crate) version: String,
    /// All engines of the process.
    pub(crate) engines: Vec<EngineStatus>,
}

/// What the thread shows.
#[derive(Clone)]
struct Shown {
    metrics: PrometheusHandle,
    status: Arc<Mutex<Option<Status>>>,
}

impl Shown {
    /// The status, where there is one.
    fn status(&self) -> Option<Page> {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let engines = status.as_ref()?();
        Some(Page { version: env!("CARGO_PKG_VERSION").to_owned(), engines })
    }
}

/// Serves metrics and status until it is dropped.
#[must_use = "nothing is served once it is dropped"]
pub struct Guard {
    address: SocketAddr,
    shown: Shown,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Where it listens: the port is what was found where 0 was asked for.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Shows what `status` gives at `/status`: of all engines of this process, by their
    /// [glances](kvx_connector::engine::Engine::glance). It is called on the thread that serves, once for each request, and must not
    /// wait.
    pub fn show(&self, status: impl Fn() -> Vec<EngineStatus> + Send + 'static) {
        let mut shown = self.shown.status.lock().unwrap_or_else(PoisonError::into_inner);
        *shown = Some(Box::new(status));
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Dropping the sender is what stops it.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // One that has panicked serves no longer either.
            let _over = thread.join();
        }
    }
}

/// Records the metrics of this process, from now on, and serves them at `address`: `HOST:PORT`, or `PORT` for one on loopback.
///
/// # Errors
///
/// [`ErrorKind::Config`]: it is no address, or nothing can listen there. [`ErrorKind::Resources`]: there is no thread.
/// [`ErrorKind::Misuse`]: something else in this process records metrics already.
pub fn serve(address: &str) -> Result<Guard> {
    let listener = listen(address)?;
    let unusable = |source: std::io::Error| {
        Error::new(ErrorKind::Resources, "metrics", "the socket cannot be used").with_source(source)
    };
    let bound = listener.local_addr().map_err(unusable)?;
    listener.set_nonblocking(true).map_err(unusable)?;
    let shown = Shown { metrics: recorder()?, status: Arc::default() };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(unusable)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = {
        let shown = shown.clone();
        let run = move || {
            runtime.spawn(http::serve(listener, shown.clone()));
            runtime.spawn(async move {
                loop {
                    tokio::time::sleep(UPKEEP).await;
                    shown.metrics.run_upkeep();
                }
            });
            // An error says that the guard is dropped, and that is what is waited for.
            let _stopped = runtime.block_on(stopped);
        };
        std::thread::Builder::new().name("kvx-metrics".into()).spawn(run).map_err(unusable)?
    };
    Ok(Guard { address: bound, shown, stop: Some(stop), thread: Some(thread) })
}

/// A socket that listens.
fn listen(address: &str) -> Result<TcpListener> {
    let refused = |what: String| {
        Error::config("metrics", what)
            .with_remedy("give HOST:PORT of this host, or PORT alone for one on loopback")
    };
    let whole = match address.parse::<u16>() {
        Ok(port) => format!("127.0.0.1:{port}"),
        Err(_) => address.to_owned(),
    };
    let found = whole.to_socket_addrs().map_err(|error| {
        refused(format!("{address:?} is not an address of this host: {error}")).with_source(error)
    })?;
    let mut last = None;
    for at in found {
        match TcpListener::bind(at) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some((at, error)),
        }
    }
    Err(last.map_or_else(
        || refused(format!("{address:?} has no address")),
        |(at, error)| {
            let limit = error.raw_os_error().and_then(kvx_core::limit_remedy);
            let kind = if limit.is_some() { ErrorKind::Resources } else { ErrorKind::Config };
            let what = refused(format!("cannot listen at {at}: {error}"));
            what.with_kind(kind).with_source(error)
        },
    ))
}

/// What records the metrics of this process: made and installed once.
fn recorder() -> Result<PrometheusHandle> {
    static INSTALLED: OnceLock<PrometheusHandle> = OnceLock::new();
    static FIRST: Mutex<()> = Mutex::new(());
    let _first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = INSTALLED.get() {
        return Ok(handle.clone());
    }
    let failed = |error: metrics_exporter_prometheus::BuildError| {
        Error::misuse("metrics", "the metrics of this process cannot be recorded")
            .with_source(error)
            .with_remedy("install no other recorder of metrics in this process")
    };
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
        .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_bytes".into()), BYTES))
        .map_err(failed)?
        .install_recorder()
        .map_err(failed)?;
    Ok(INSTALLED.get_or_init(|| handle).clone())
}
