//! No bytes, however wrong, make the reader of cards panic or take memory out of proportion.
//!
//! The number of cases is fixed; the seed is printed where a case fails, and `KVX_SEED` replays it.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvx_core::card::{Address, Card, CardReader, EngineName, FeatureSet, Offer};
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout};
use kvx_core::memory::KeyBlob;

/// Counts what this thread holds, and the most that it has held.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn add(bytes: usize) {
    let held = HELD.get().wrapping_add(bytes);
    HELD.set(held);
    // What another thread allocated and this one frees wraps below zero: no peak.
    if held < isize::MAX.cast_unsigned() {
        PEAK.set(PEAK.get().max(held));
    }
}

// SAFETY: all calls are passed on as they are; counting neither allocates nor unwinds (the cells have constant initial
// values and nothing to drop).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist for a moment.
        add(size);
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `work` held at once.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get() - before)
}

/// Reads any bytes; what it reads must be written and read again as the same. Returns whether it was a card, and the peak.
fn read(bytes: &[u8]) -> (kvx_core::Result<Card>, usize) {
    let reader = CardReader::default().with_features(FeatureSet::from_bits(u64::MAX));
    peak(|| {
        let _ = reader.peek(bytes);
        reader.decode(bytes)
    })
}

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

fn sample(named: NamedLayout) -> Vec<u8> {
    let model = ModelGeometry::llama_like(2, 2, 4, Dtype::Bf16).unwrap();
    let coords = Grid::new(1, 1, 1).unwrap().ranks().next().unwrap();
    let layout = LayoutBuilder::new(&model, named).blocks(8).build(coords).unwrap();
    let keys = vec![KeyBlob::new(vec![1; 9]).unwrap(); layout.regions().len()];
    let card = Card::new(
        EngineName::new("prefill-7").unwrap(),
        Incarnation::from_bytes([7; 16]),
        "[::1]:5600".parse::<Address>().unwrap(),
        Facts::new().with(Facts::MODEL, "a model").unwrap().with("b", 1).unwrap(),
        layout,
    );
    let offer = Offer::new("ucx", HandshakeBytes::new(vec![2; 12]).unwrap(), keys).unwrap();
    card.unwrap().with_offer(offer).unwrap().encode().unwrap()
}

const HEAD_BYTES: usize = 32;
const BODY_BYTES: usize = 36;
const ENVELOPE: usize = 40;

fn length_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Makes the envelope's lengths those of what is there, so that a wrong length is not all that is ever found.
fn fit(bytes: &mut [u8]) {
    let Some(rest) = bytes.len().checked_sub(ENVELOPE) else { return };
    let rest = u32::try_from(rest).unwrap();
    let head = length_at(bytes, HEAD_BYTES).min(rest);
    bytes[HEAD_BYTES..BODY_BYTES].copy_from_slice(&head.to_le_bytes());
    bytes[BODY_BYTES..ENVELOPE].copy_from_slice(&(rest - head).to_le_bytes());
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
    // First bytes of MessagePack values, the large ones above all.
    const MARKERS: [u8; 12] =
        [0x80, 0x8f, 0x90, 0x9f, 0xc0, 0xc6, 0xc9, 0xcf, 0xdb, 0xdd, 0xdf, 0xff];
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let length = random.below(9).min(bytes.len() - at);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.byte(),
            2 => bytes[at] = MARKERS[random.below(MARKERS.len())],
            3 => bytes[at..at + length].fill(0xff),
            4 => drop(bytes.drain(at..at + length)),
            5 => {
                let new: Vec<u8> = (0..length).map(|_| random.byte()).collect();
                bytes.splice(at..at, new);
            }
            6 => {
                let other = &others[random.below(others.len())];
                let from = random.below(other.len());
                let length = random.below(200).min(other.len() - from);
                bytes.splice(at..at, other[from..from + length].iter().copied());
            }
            _ => {
                let to = at + random.below(bytes.len() - at);
                let part = bytes[at..to].to_vec();
                bytes.splice(at..at, part);
            }
        }
        if bytes.is_empty() {
            bytes.push(random.byte());
        }
    }
    if random.below(4) > 0 {
        fit(bytes);
    }
}

#[test]
fn a_hundred_thousand_wrong_cards() {
    let seed = std::env::var("KVX_SEED").map_or_else(
        |_| std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into(),
        |text| text.parse::<u64>().unwrap(),
    );
    println!("KVX_SEED={seed}");
    let mut random = Random(seed);
    let samples: Vec<Vec<u8>> = NamedLayout::ALL.into_iter().map(sample).collect();
    let (mut cards, mut bodies) = (0, 0);
    for case in 0..100_000 {
        let mut bytes = samples[random.below(samples.len())].clone();
        if case % 10 == 0 {
            // Nothing of a card but its envelope.
            for byte in &mut bytes[ENVELOPE..] {
                *byte = random.byte();
            }
        } else {
            mutate(&mut random, &mut bytes, &samples);
        }
        let (result, held) = read(&bytes);
        let limit = 32 * bytes.len() + 4096;
        assert!(held <= limit, "case {case} of seed {seed} held {held} bytes, over {limit}");
        match result {
            Ok(card) => {
                cards += 1;
                let reader = CardReader::default().with_features(FeatureSet::from_bits(u64::MAX));
                let again = reader.decode(&card.encode().unwrap()).unwrap();
                assert_eq!(again.layout(), card.layout(), "case {case} of seed {seed}");
                assert_eq!(again.offers(), card.offers(), "case {case} of seed {seed}");
                assert_eq!(again.identity(), card.identity(), "case {case} of seed {seed}");
            }
            Err(error) => bodies += usize::from(error.to_string().contains("the body")),
        }
    }
    println!("{cards} were cards, {bodies} were refused for their bodies");
    // Otherwise most of the reader was never reached.
    assert!(cards > 1000 && bodies > 10_000, "seed {seed}: {cards} cards, {bodies} bodies");
}

/// A card with this body, whatever it is.
fn with_body(body: &[u8]) -> Vec<u8> {
    let mut bytes = sample(NamedLayout::FlashAttentionNhd);
    let head = usize::try_from(length_at(&bytes, HEAD_BYTES)).unwrap();
    bytes.truncate(ENVELOPE + head);
    bytes.extend_from_slice(body);
    fit(&mut bytes);
    bytes
}

/// A MessagePack map of these fields, the values of which are encoded already.
fn fields(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0x80 | u8::try_from(fields.len()).unwrap()];
    for (name, value) in fields {
        bytes.push(0xa0 | u8::try_from(name.len()).unwrap());
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(value);
    }
    bytes
}

/// A MessagePack list of `count` times the same value.
fn repeat(count: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xdd];
    bytes.extend_from_slice(&u32::try_from(count).unwrap().to_be_bytes());
    bytes.extend(value.iter().copied().cycle().take(count * value.len()));
    bytes
}

fn packed(value: &impl serde::Serialize) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

/// The largest cards that may be had, filled with what costs most to read.
#[test]
fn dear_cards() {
    // Structures are written as lists, which is shorter than maps, and read all the same.
    let grid = ((1, 1, 1), 0, 0, 0);
    let region = packed(&(1_u64 << 40, "host"));
    let layout = |regions: &[u8], groups: &[u8], tensors: &[u8]| {
        let grid = packed(&grid);
        let parts = [("coords", &grid[..]), ("regions", regions), ("groups", groups)];
        fields(&[&parts[..], &[("tensors", tensors)]].concat())
    };
    let tensors = |block_tokens: u32, tensors: &[Vec<u8>]| {
        let group = packed(&("attention", block_tokens, block_tokens, 2, None::<u32>));
        let mut list = repeat(0, &[]);
        list[1..].copy_from_slice(&u32::try_from(tensors.len()).unwrap().to_be_bytes());
        list.extend(tensors.concat());
        layout(&repeat(1, &region), &repeat(1, &group), &list)
    };
    let offer = |keys: &[u8]| {
        let backend = packed(&"ucx");
        let start = [("backend", &backend[..]), ("handshake", &[0x90]), ("keys", keys)];
        fields(&[&start[..], &[("options", &[0x80])]].concat())
    };
    let body = |layout: &[u8], offers: &[u8]| fields(&[("layout", layout), ("offers", offers)]);
    let empty = layout(&[0x90], &[0x90], &[0x90]);
    let long = [&[0xdb][..], &1_000_000_u32.to_be_bytes(), &[b'x'; 1_000_000]].concat();
    let key = [&[0xc5, 0x10, 0][..], &[7; 4096]].concat();
    let side_by_side: Vec<_> = (0..4096)
        .map(|i| tensor(i, "block", i.into(), [(2, 4096), (1, 0), (1, 0), (1, 0)]))
        .collect();
    let interleaved = |rows: u32| {
        [
            tensor(0, "token", 0, [(2, 1 << 30), (512, 4096), (rows / 512, 4), (1, 0)]),
            tensor(1, "token", 1, [(2, 1 << 30), (512, 4100), (rows / 512, 4), (1, 0)]),
        ]
    };
    let cases = [
        ("lists in lists, all announced full", vec![0xdd; 1_000_000]),
        ("maps in maps, all announced full", vec![0xdf; 1_000_000]),
        ("a long name", [&[0x81][..], &long].concat()),
        ("a long value", fields(&[("layout", &long)])),
        ("a long value passed over", fields(&[("later", &long)])),
        ("a list passed over", fields(&[("later", &repeat(1_000_000, &[0xc0]))])),
        ("regions", body(&layout(&repeat(4096, &region), &[0x90], &[0x90]), &[0xc0])),
        ("keys", body(&empty, &repeat(16, &offer(&repeat(4096, &[0x90]))))),
        ("long keys", body(&empty, &repeat(1, &offer(&repeat(250, &key))))),
        ("many tensors side by side", body(&tensors(1, &side_by_side), &[0x90])),
        ("interleaved tensors", body(&tensors(512, &interleaved(1 << 15)), &[0x90])),
        ("more interleaved tensors", body(&tensors(512, &interleaved(1 << 19)), &[0x90])),
    ];
    for (what, body) in cases {
        let bytes = with_body(&body);
        assert!(bytes.len() <= Card::MAX_BYTES, "{what}: {} bytes", bytes.len());
        let started = std::time::Instant::now();
        let (result, held) = read(&bytes);
        let result = result.map_or_else(|error| error.to_string(), |_| "a card".into());
        println!("{what}: {} bytes, held {held}, {:?}: {result}", bytes.len(), started.elapsed());
        assert!(held <= 8 * Card::MAX_BYTES, "{what}: held {held} bytes");
        assert!(started.elapsed() < std::time::Duration::from_secs(10), "{what} took too long");
    }
}

fn tensor(layer: u32, granularity: &str, base: u64, axes: [(u32, u64); 4]) -> Vec<u8> {
    let [block, token, head, dim] = axes;
    let shard = (0, head.0);
    let start = packed(&(layer, "key", "u8", 0, 0, base, block, token, head, dim));
    let end = packed(&(shard, granularity, "full", "all", false));
    // Two lists of ten and five become one of fifteen.
    [&[0x9f], &start[1..], &end[1..]].concat()
}
