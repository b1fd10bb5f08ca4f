//! What it says of itself, and what it costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kvx_core::Result;
use kvx_core::backend::{PeerInfo, Submit};
use kvx_core::capability::Capabilities;
use kvx_core::id::PeerId;

use crate::wrapper::{At, Post, Sabotage};

#[derive(Default)]
pub(crate) struct CapabilitiesChange;

impl Sabotage for CapabilitiesChange {
    fn later_capabilities(&self, honest: &Capabilities) -> Option<Capabilities> {
        let mut later = honest.clone();
        later.native_notification = !later.native_notification;
        Some(later)
    }
}

#[derive(Default)]
pub(crate) struct CapabilitiesContradict;

impl Sabotage for CapabilitiesContradict {
    fn capabilities(&self, _: &At, honest: &mut Capabilities) {
        honest.limits.max_in_flight = 0;
    }
}

/// The descriptor is silent where it is claimed, and there where it is not.
#[derive(Default)]
pub(crate) struct Descriptor;

impl Sabotage for Descriptor {
    fn descriptor_speaks(&self) -> bool {
        false
    }

    fn descriptor_unclaimed(&self) -> bool {
        true
    }
}

#[derive(Default)]
pub(crate) struct TransportUnknown;

impl Sabotage for TransportUnknown {
    fn peer_info(&self, at: &At, peer: PeerId) -> Result<PeerInfo> {
        at.backend.peer_info(peer).map(|_| PeerInfo::new(""))
    }
}

#[derive(Default)]
pub(crate) struct LeaksThread;

impl Sabotage for LeaksThread {
    fn opened(&self, _: &At) {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
    }
}

#[derive(Default)]
pub(crate) struct LeaksDescriptor;

impl Sabotage for LeaksDescriptor {
    fn opened(&self, _: &At) {
        std::mem::forget(std::fs::File::open("/dev/null"));
    }
}

/// Forgets to give back the buffer of a transfer.
#[derive(Default)]
pub(crate) struct LeaksMemory;

impl Sabotage for LeaksMemory {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        // An optimiser leaves out memory that nobody looks at.
        std::mem::forget(std::hint::black_box(vec![1_u8; 64 << 10]));
        post.to(at)
    }
}

/// Spins until the stage is gone.
#[derive(Default)]
pub(crate) struct BurnsProcessor {
    stop: Arc<AtomicBool>,
}

impl Sabotage for BurnsProcessor {
    fn opened(&self, _: &At) {
        let stop = Arc::clone(&self.stop);
        std::thread::spawn(move || {
            while !stop.load(SeqCst) {
                std::hint::spin_loop();
            }
        });
    }
}

impl Drop for BurnsProcessor {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
    }
}
