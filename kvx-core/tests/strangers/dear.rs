//! Cards that cost as much to read as can be.

use kvx_core::card::Card;
use kvx_core::layout::NamedLayout;

use super::allocator::Taken;
use super::mutate::fit;
use super::read;
use super::samples::{self, ENVELOPE, HEAD_BYTES, length_at};

/// A card with this body, whatever it is.
fn with_body(body: &[u8]) -> Vec<u8> {
    let mut bytes = samples::small(NamedLayout::FlashAttentionNhd);
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
        let (result, Taken { held, .. }) = read(&bytes);
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
