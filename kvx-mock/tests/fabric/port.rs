//! Through the port: what is too long or too much for the fabric is split, and all of it arrives.

use kvx_core::backend::TransferBackend;
use kvx_core::memory::Region;
use kvx_core::port::Port;
use kvx_core::transfer::{Mode, Segment};
use kvx_mock::{Fabric, Preset};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{bytes, presets, seeds};

const BYTES: usize = 4096;

/// Segments that touch no byte of the target twice, and what the target must then hold.
fn segments(rng: &mut ChaCha8Rng, source: &[u8], target: &mut [u8], mode: Mode) -> Vec<Segment> {
    let (mut list, mut at) = (Vec::new(), 0);
    loop {
        at += rng.random_range(0..40_usize);
        let bytes = rng.random_range(1..=200_usize);
        if at + bytes > BYTES {
            return list;
        }
        let from = rng.random_range(0..=BYTES - bytes);
        target[at..][..bytes].copy_from_slice(&source[from..][..bytes]);
        let (from, to) = (from as u64, at as u64);
        let (local_offset, remote_offset) =
            if mode == Mode::Read { (to, from) } else { (from, to) };
        list.push(Segment {
            local_region: 0,
            remote_region: 0,
            local_offset,
            remote_offset,
            bytes: bytes as u64,
        });
        at += bytes;
    }
}

fn run(seed: u64, preset: &Preset, mode: Mode) {
    println!("seed {seed}, preset {}, {mode}", preset.name());
    let fabric = Fabric::new(seed);
    let port = |name: &str| {
        let backend: std::sync::Arc<dyn TransferBackend> = fabric.backend(preset.clone(), name);
        Port::new(backend).unwrap()
    };
    let (mine, theirs) = (port("mine"), port("theirs"));
    let (at_theirs, reply) = theirs.accept(&mine.offer().unwrap()).unwrap();
    let (peer, completion) = mine.complete(&reply).unwrap();
    theirs.finish(&completion).unwrap();

    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut contents = [[0; BYTES]; 2];
    let regions = contents.each_mut().map(|contents| {
        rng.fill(&mut contents[..]);
        let region = Region::host(BYTES as u64).unwrap();
        region.write_at(0, contents).unwrap();
        region
    });
    let set = mine.region_set(&[mine.register(&regions[0]).unwrap()]).unwrap();
    let key = theirs.key_blob(theirs.register(&regions[1]).unwrap()).unwrap();
    mine.add_regions(peer, &[(key, BYTES as u64)]).unwrap();

    let [local, remote] = &mut contents;
    let (source, target) = if mode == Mode::Read { (&*remote, local) } else { (&*local, remote) };
    let list = segments(&mut rng, source, target, mode);
    let limits = preset.capabilities().limits;
    let parts: u64 =
        list.iter().map(|segment| segment.bytes.div_ceil(limits.max_segment_bytes)).sum();

    let mut transfer = mine.transfer(peer, mode, &set, &list, Some(b"told")).unwrap();
    let mut told = Vec::new();
    let report = loop {
        told.extend(theirs.next_notification());
        if let Some(result) = transfer.try_result() {
            break result.unwrap();
        }
        mine.poll();
        theirs.poll();
    };
    assert_eq!(report.bytes, list.iter().map(|segment| segment.bytes).sum::<u64>());
    assert_eq!(report.segments, parts);
    assert!(report.batches >= parts.div_ceil(limits.max_batch_segments.into()));
    for (region, contents) in regions.iter().zip(contents) {
        assert_eq!(bytes(region), contents);
    }
    while fabric.advance(1) == 1 {}
    while theirs.poll() > 0 {}
    told.extend(std::iter::from_fn(|| theirs.next_notification()));
    assert_eq!(told, [(at_theirs, b"told".to_vec())]);
}

#[test]
fn everything_arrives_whatever_the_limits() {
    for preset in presets() {
        for seed in seeds(50) {
            for mode in [Mode::Read, Mode::Write] {
                run(seed, &preset, mode);
            }
        }
    }
}
