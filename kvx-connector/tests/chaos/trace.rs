//! Which requests come when, and what becomes of them.

use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

/// Requests of a replay.
const REQUESTS: usize = 120;

/// How long they come.
const SPAN: Duration = Duration::from_millis(1100);

/// Most tokens of one.
const MOST_TOKENS: u64 = 400;

/// A request, and what its engines do with it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// When it comes, from the beginning of the replay.
    pub(crate) at: Duration,
    pub(crate) tokens: u64,
    /// Tokens that the consumer has already.
    pub(crate) has: u64,
    pub(crate) deadline: Duration,
    pub(crate) ttl: Duration,
    pub(crate) fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is read, and read again if that fails.
    Read,
    /// Nobody ever reads it.
    Unread,
    /// The consumer gives it up, after this time.
    Aborted(Duration),
    /// The producer takes it back, after this time.
    Withdrawn(Duration),
}

/// Arrival and prompt of a request.
#[derive(serde::Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
}

/// A piece of the trace in the file that `KVX_TRACE` names, made fast and small; without one, a piece like it.
pub(crate) fn draw(chance: &mut ChaCha8Rng) -> Vec<Entry> {
    let lines = match std::env::var("KVX_TRACE") {
        Ok(file) => read(&file, chance),
        Err(_) => synthetic(chance),
    };
    let (first, last) = (lines[0].timestamp, lines[lines.len() - 1].timestamp);
    let span = u64::try_from(SPAN.as_micros()).unwrap();
    let entry = |line: &Line| {
        let at = (line.timestamp - first) * span / (last - first).max(1);
        // Those of one moment come apart by a little.
        let at = Duration::from_micros(at + chance.random_range(0..20_000));
        let tokens = (line.input_length / 32).clamp(1, MOST_TOKENS);
        let soon = Duration::from_micros(chance.random_range(0..15_000));
        Entry {
            at,
            tokens,
            has: if chance.random_ratio(1, 5) { chance.random_range(0..tokens) } else { 0 },
            deadline: Duration::from_millis(chance.random_range(500..2500)),
            ttl: Duration::from_millis(chance.random_range(400..800)),
            fate: match chance.random_range(0..20) {
                0 => Fate::Unread,
                1..=2 => Fate::Aborted(soon),
                3 => Fate::Withdrawn(soon),
                _ => Fate::Read,
            },
        }
    };
    lines.iter().map(entry).collect()
}

fn read(file: &str, chance: &mut ChaCha8Rng) -> Vec<Line> {
    let text =
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("KVX_TRACE: {file}: {error}"));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() >= REQUESTS, "KVX_TRACE: {file}: fewer than {REQUESTS} requests");
    let first = chance.random_range(0..=lines.len() - REQUESTS);
    let parse =
        |line: &&str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{file}: {error}"));
    lines[first..first + REQUESTS].iter().map(parse).collect()
}

/// Arrivals as by chance, a few at once; prompts of which most are short and some are long.
fn synthetic(chance: &mut ChaCha8Rng) -> Vec<Line> {
    let mut timestamp = 0;
    let line = |_| {
        if chance.random_ratio(2, 3) {
            timestamp += chance.random_range(1..3000_u64);
        }
        let longest = 1_u64 << chance.random_range(6..15);
        Line { timestamp, input_length: chance.random_range(1..longest) }
    };
    (0..REQUESTS).map(line).collect()
}
