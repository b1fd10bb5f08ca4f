//! Whether it can be used here, and what was found.

use std::sync::Arc;

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::config::BackendConfig;
use kvx_core::ErrorKind;
use kvx_core::memory::MemoryKind;
use kvx_core::registry::Probe;

use crate::config::Options;
use crate::opening;
use crate::sys::{Context, MOST_PAYLOAD};

/// Segments of a batch.
pub(crate) const BATCH: u32 = 4096;
/// Bytes of a notification.
pub(crate) const NOTIFICATION: u32 = 4096;
/// Bytes of a segment.
const SEGMENT: u64 = 1 << 30;
/// Batches in flight to a peer.
pub(crate) const IN_FLIGHT: u32 = 256;
/// Notifications of a peer that may wait to be polled, before it is told to wait.
pub(crate) const NOTES: usize = 1024;

const _: () = assert!(NOTIFICATION as usize <= MOST_PAYLOAD, "a notification is one message");

pub(crate) fn capabilities(context: &Context) -> Capabilities {
    let mut can = Capabilities::none();
    can.read = true;
    can.write = true;
    can.host_memory = context.knows(MemoryKind::Host);
    can.cuda_memory = context.knows(MemoryKind::Cuda(0));
    can.limits.max_segment_bytes = SEGMENT;
    can.limits.max_batch_segments = BATCH;
    can.limits.max_notification_bytes = NOTIFICATION;
    can.limits.max_in_flight = IN_FLIGHT;
    // UCX may use several ways at once.
    can.ordering = Ordering::Unordered;
    // UCX was seen to go on reading and writing after the target deregistered.
    can.revoke = Revoke::None;
    can.event_fd = true;
    can
}

pub(crate) fn probe(config: &BackendConfig) -> Probe {
    let found = Options::read(config).and_then(|options| {
        let context = Arc::new(opening::context(&options)?);
        opening::worker(&context, &options)?;
        Ok((context, options))
    });
    match found {
        Ok((context, options)) => Probe::Available {
            detail: detail(&context, &options),
            capabilities: Box::new(capabilities(&context)),
        },
        Err(error) if error.kind() == ErrorKind::Config => {
            Probe::bad_options(&error, "see docs/ucx.md for the options of this backend")
        }
        Err(error) => Probe::Unavailable {
            remedy: error.remedy().map(str::to_owned),
            reason: match error.context().iter().find(|(key, _)| *key == "said") {
                Some((_, said)) => format!("{}: {said}", error.message()),
                None => error.message().to_owned(),
            },
        },
    }
}

/// What UCX is told to do though it cannot do it well.
fn hazard(context: &Context, options: &Options) -> &'static str {
    match (options.says("MM_ERROR_HANDLING"), context.library().is_fragile()) {
        (false, _) => "",
        (true, false) => "; a peer that ends may hold up all others (MM_ERROR_HANDLING)",
        (true, true) => {
            "; a peer that ends may hold up all others, and what was in flight to it for ever (MM_ERROR_HANDLING)"
        }
    }
}

fn detail(context: &Context, options: &Options) -> String {
    let library = context.library();
    let (version, path) = (library.version_text(), &library.path);
    format!("UCX {version} ({path}); {}{}", context.resources().join(" "), hazard(context, options))
}
