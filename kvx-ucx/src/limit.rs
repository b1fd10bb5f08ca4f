//! What UCX can do at most here: the same segments in a loop of its own, without a backend, for benchmarks. It spins.

use std::sync::Arc;

use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};

use crate::config::Options;
use crate::error::{BACKEND, refused, transfer};
use crate::opening;
use crate::sys::{Batch, Context, Endpoint, Key, Memory, Part, Worker};

/// One side of a loop over UCX. The one that is read from, or written to, must make [`progress`](Self::progress), too.
///
/// What it is given by the other side is believed: it is for benchmarks, where both are one's own.
#[derive(Debug)]
pub struct Raw {
    keys: Vec<Arc<Key>>,
    endpoint: Option<Endpoint>,
    memory: Vec<Arc<Memory>>,
    worker: Worker,
    context: Arc<Context>,
}

/// What the other side needs of a region.
#[derive(Clone, Debug)]
pub struct RawKey {
    address: u64,
    bytes: u64,
    packed: Vec<u8>,
}

impl Raw {
    /// Opens UCX as the backend would with these options.
    ///
    /// # Errors
    ///
    /// As for opening the backend.
    pub fn open(options: &Options) -> Result<Self> {
        let context = Arc::new(opening::context(options)?);
        let worker = opening::worker(&context, options)?;
        Ok(Self { keys: Vec::new(), endpoint: None, memory: Vec::new(), worker, context })
    }

    /// Its address, for the other side.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] or [`ErrorKind::Resources`] when UCX gives none.
    pub fn address(&self) -> Result<Vec<u8>> {
        self.worker.address().map_err(|failure| refused(self.context.library(), &failure))
    }

    /// Registers a region: that of the next number, as segments name it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Fabric`] when UCX cannot.
    pub fn register(&mut self, region: &Region) -> Result<RawKey> {
        let library = self.context.library();
        let failed = |status| transfer(library, status).with_kind(ErrorKind::Fabric);
        let memory = Memory::map(&self.context, region, u64::MAX).map_err(failed)?;
        let packed = memory.pack().map_err(failed)?;
        self.memory.push(Arc::new(memory));
        let keys = packed.keys.into_iter().next().unwrap_or_default();
        Ok(RawKey { address: packed.address, bytes: packed.bytes, packed: keys })
    }

    /// Connects to the other side, and takes the keys to its regions, in their order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`] or [`ErrorKind::Fabric`] when UCX cannot.
    pub fn connect(&mut self, address: &[u8], keys: &[RawKey]) -> Result<()> {
        let library = self.context.library();
        let endpoint =
            Endpoint::new(&mut self.worker, address, 1).map_err(|failure| transfer(library, failure.status))?;
        for RawKey { address, bytes, packed } in keys {
            let packed = std::iter::once(packed.as_slice());
            let key = Key::new(&endpoint, (0, 0), (*address, *bytes, u64::MAX), packed);
            self.keys.push(Arc::new(key.map_err(|status| transfer(library, status))?));
        }
        self.endpoint = Some(endpoint);
        Ok(())
    }

    /// Makes some progress.
    pub fn progress(&mut self) {
        self.worker.progress();
    }

    /// Moves all segments once, at most `window` of them at a time, and waits until they are where they belong.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: not connected, or a segment outside its regions. [`ErrorKind::Peer`] or [`ErrorKind::Fabric`]: as UCX
    /// says.
    pub fn run(&mut self, mode: Mode, segments: &[Segment], window: u32) -> Result<()> {
        let endpoint = self.endpoint.as_ref().ok_or_else(|| {
            Error::misuse("limit", "the loop is not connected").with_backend(BACKEND)
        })?;
        let (memory, keys) = (self.memory.clone(), self.keys.clone());
        let mut batch = Batch::new(&self.worker, &endpoint.load, 2, memory, keys);
        for segment in segments {
            while endpoint.load() >= window {
                self.worker.progress();
            }
            let part = Part {
                memory: segment.local_region,
                key: segment.remote_region,
                local: segment.local_offset,
                remote: segment.remote_offset,
                bytes: segment.bytes,
            };
            batch.transfer(endpoint, mode, &part);
        }
        if mode == Mode::Write {
            batch.flush(endpoint);
        }
        while batch.is_pending() {
            self.worker.progress();
        }
        while self.worker.inbox().pop().is_some() {}
        match batch.failure() {
            None => Ok(()),
            Some(status) => Err(transfer(self.context.library(), status)),
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(endpoint) = &mut self.endpoint {
            endpoint.close();
            // Closing is short; what is not over by then ends with the worker.
            for _ in 0..1000 {
                self.worker.progress();
            }
        }
        // Of the worker's, and so before it.
        self.keys.clear();
    }
}
