//! What went wrong in others' programs, and is not tested elsewhere.

use kvx_core::ErrorKind;
use kvx_core::backend::TransferBackend as _;
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::pair::{Pair, Way, alone, open_with};

/// Known failure 101: of a region larger than what one registration may hold, the rest was dropped without a word.
pub(crate) fn a_region_of_several_registrations_is_whole() {
    const PIECE: usize = 1 << 20;
    const SIZE: usize = PIECE * 7 / 2;
    const MOVED: usize = 1001;
    let open = || open_with(&format!("{},piece_bytes={PIECE}", Way::Tcp.options())).unwrap();
    let pair = Pair::meet(&open(), &open());
    let [mine, theirs] = [0, 1].map(|_| Region::host(SIZE as u64).unwrap());
    let (local, remote) = pair.lane(&mine, &theirs);
    let segment = |remote_offset: usize, bytes: usize| PostedSegment {
        local,
        remote,
        local_offset: 0,
        remote_offset: remote_offset as u64,
        bytes: bytes as u64,
    };
    let bytes: Vec<u8> = (0..=250).cycle().take(SIZE).collect();
    mine.write_at(0, &bytes).unwrap();
    // The whole, and then back, moved by some bytes, so that the places where the two sides are split are not the same.
    pair.transfer(TransferId(1), Mode::Write, &[segment(0, SIZE)]);
    let mut seen = vec![0; SIZE];
    theirs.read_at(0, &mut seen).unwrap();
    assert!(seen == bytes, "the whole");
    mine.write_at(0, &vec![0; SIZE]).unwrap();
    pair.transfer(TransferId(2), Mode::Read, &[segment(MOVED, SIZE - MOVED)]);
    mine.read_at(0, &mut seen).unwrap();
    assert!(seen[..SIZE - MOVED] == bytes[MOVED..], "moved by {MOVED} bytes");
    for boundary in [PIECE, 2 * PIECE, 3 * PIECE] {
        pair.transfer(TransferId(3), Mode::Read, &[segment(boundary - 7, 20)]);
        let mut few = [0; 20];
        mine.read_at(0, &mut few).unwrap();
        assert_eq!(few[..], bytes[boundary - 7..][..20], "around {boundary}");
    }
    let beyond = [segment(SIZE - 5, 6)];
    let error = pair.one.submit(TransferId(4), pair.at_one, Mode::Read, &beyond, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "one byte more than there is: {error}");
}

/// Known failure 106: once much memory was pinned, there was none left for a library that was opened after it.
pub(crate) fn a_backend_opens_beside_much_registered_memory() {
    const MUCH: u64 = 1 << 30;
    alone("a_backend_opens_beside_much_registered_memory", &[], || {
        let least = Some(64 << 10);
        setrlimit(Resource::Memlock, Rlimit { current: least, maximum: least }).unwrap();
        let one = open_with(&Way::Tcp.options()).unwrap();
        let much = Region::host(MUCH).unwrap();
        let first = one.register(&much).unwrap();
        let other = open_with(&Way::Tcp.options()).unwrap();
        let pair = Pair::meet(&one, &other);
        let (local, remote) = pair.lane(&much, &Region::host(4096).unwrap());
        let segment = PostedSegment {
            local,
            remote,
            local_offset: MUCH - 4096,
            remote_offset: 0,
            bytes: 4096,
        };
        pair.transfer(TransferId(1), Mode::Write, &[segment]);
        one.deregister(first).unwrap();
        pair.transfer(TransferId(2), Mode::Read, &[segment]);
    });
}
