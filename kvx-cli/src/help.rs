//! Help that lists what there is.

use kvx_core::layout::{ModelGeometry, NamedLayout};

/// Names in a line.
const IN_A_LINE: usize = 4;

/// What `--model` takes.
#[must_use]
pub(crate) fn model() -> String {
    let names = lines(ModelGeometry::PRESETS, "  ");
    format!("A preset's name, or the path of a Hugging Face config.json. Presets:\n{names}")
}

/// What `--producer` and `--consumer` take, after the sentence `what`.
#[must_use]
pub(crate) fn shape(what: &str) -> String {
    let layouts: Vec<&str> = NamedLayout::ALL.iter().map(|layout| layout.as_str()).collect();
    let layouts = lines(&layouts, "             ");
    format!(
        "{what}

Any of these, as key=value, separated by commas:
  tp, pp, dp tensor parallel ranks, pipeline stages, data parallel replicas
  block      tokens per block
  kernel     tokens per block of the attention kernel, where that is smaller
  blocks     blocks in the pool
  layout     nhd and hnd (FlashAttention's), or one of
{layouts}
  regions    tensor, layer or single: what is a region of its own
  groups     shared or window: whether layers with a window have a block table of their own
  conv       channels or taps: what is side by side in a convolution state
  dtype      element type, where it is not the model's"
    )
}

/// What `--backend` takes.
pub(crate) const BACKEND: &str = "\
Backend to use, with its options, for example mock,preset=efa [default: the best there is]

kvx backends lists those that are built in, kvx backends NAME the options of one, with their units and defaults. Without it
KVX_BACKEND names one, whose options KVX_BACKEND_OPTIONS has. For example:
  shm,copy_threads=2     two threads copy
  ucx,require=rc_*       data goes over RC, or not at all
  mock,preset=efa        behaves like EFA (or rc, ucx-tcp); preset=loopback copies at once";

/// What `--backend` of `kvx bench` takes.
pub(crate) const MEASURED: &str = "\
Backend to measure, with its options, for example shm,copy_threads=2 [default: the best there is]

kvx backends lists those that are built in, kvx backends NAME the options of one, with their units and defaults";

/// What `--peer-command` runs.
pub(crate) const PEER_COMMAND: &str = "\
Another program to compare with, round by round

It is started once, by the shell. In each round it is sent a line on standard input, does the same work once, and prints a line
with its rate in GB/s (10^9 bytes per second). Between its turns it is stopped, so that its threads disturb nobody. A turn that
takes longer than --peer-seconds is an error.";

fn lines(names: &[&str], indent: &str) -> String {
    let lines: Vec<String> =
        names.chunks(IN_A_LINE).map(|names| format!("{indent}{}", names.join(", "))).collect();
    lines.join(",\n")
}
