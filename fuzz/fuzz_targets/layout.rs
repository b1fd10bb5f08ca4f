//! Any bytes as a rank's layout; what is one can be planned onto itself.

#![no_main]

use kvx_core::capability::Limits;
use kvx_core::layout::RankLayout;
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, Request, SegmentList};
use kvx_core::transfer::Mode;
use kvx_core::wire;
use libfuzzer_sys::fuzz_target;

/// Longest list that is made of one layout.
const MAX_RUNS: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let Ok(layout) = wire::from_bytes::<RankLayout>("fuzz", "the layout", bytes) else { return };
    let checked = RankLayout::new(layout.clone().into_parts()).expect("it was checked");
    assert_eq!(checked, layout);
    let layouts = [layout];
    let Ok(pairing) = Pairing::new(&layouts, &layouts, 0) else { return };
    for pair in pairing.pairs() {
        let Ok(plan) = PeerPlan::compile(&layouts[0], &layouts[0], pair) else { continue };
        // Two blocks of each group, in descending order.
        let ids = [1_u32, 0];
        let tables: Vec<_> = layouts[0].groups().iter().map(|_| BlockTable::new(&ids)).collect();
        let request = Request::whole(3, &tables, &tables);
        if plan.runs(&request).is_ok_and(|runs| runs <= MAX_RUNS) {
            let mut list = SegmentList::new();
            let done = plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut list);
            for segment in done.map_or(&[][..], |()| list.as_slice()) {
                let region = layouts[0].regions()[segment.local_region as usize];
                assert!(segment.local_offset + segment.bytes <= region.bytes, "{segment:?}");
            }
        }
    }
});
