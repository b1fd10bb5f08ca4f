//! Key blobs: what a peer needs in order to reach a region.

use kvx_core::ErrorKind;
use kvx_core::id::{PeerId, RemoteRegionId};

use super::Group;
use super::shapes::modes;
use crate::suite::clause::{Clause, Point, Verdict, ensure, refused};
use crate::suite::lane::Lane;
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Key blobs",
    about: "They come from a peer: nothing in them may harm, and none reaches further than it says.",
    clauses: &[
        Clause::new(
            "key.truncated",
            Point::Memory,
            "A key blob that is cut short, anywhere, or has a byte too many is refused as the peer's fault.",
            &["import_panics", "cut_key_accepted", "import_blames_the_caller"],
            truncated,
        ),
        Clause::new(
            "key.garbled",
            Point::Memory,
            "A key blob with any bit flipped is refused as the peer's fault, or taken; nothing breaks, and the good one still works.",
            &["import_panics_on_a_flipped_bit"],
            garbled,
        ),
        Clause::new(
            "key.foreign",
            Point::Memory,
            "Bytes that are no key blob of this backend are refused as the peer's fault.",
            &["foreign_key_accepted", "import_panics"],
            foreign,
        ),
        Clause::new(
            "key.other_incarnation",
            Point::Memory,
            "A key blob of one peer is refused where another is named: it would reach the wrong memory.",
            &["key_of_another_peer_accepted"],
            other_incarnation,
        ),
        Clause::new(
            "key.released",
            Point::Stale,
            "A key that was released is refused as misuse, also by a second release; others of the peer still work.",
            &["released_key_accepted"],
            released,
        ),
        Clause::new(
            "key.unknown",
            Point::Stale,
            "A key that was never given out, and an unknown peer, are refused as misuse.",
            &["unknown_key_released"],
            unknown,
        ),
        Clause::new(
            "key.forgotten_with_peer",
            Point::Stale,
            "A peer's keys end with its connection: after a new one to the same peer they are still refused as misuse.",
            &["keys_outlive_the_connection"],
            forgotten_with_peer,
        ),
        Clause::new(
            "key.after_deregister",
            Point::Memory,
            "The key of a region that was deregistered never reaches what is registered after it.",
            &["key_names_a_slot"],
            after_deregister,
        ),
    ],
};

/// The lane's own key still works.
fn works(world: &World, lane: &mut Lane) -> Verdict {
    for mode in modes(lane)? {
        let segment = lane.segment(1, 2, 40);
        world.transfer(lane, mode, &[segment], None)?;
    }
    lane.check("with the good key, in the end")
}

fn truncated(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let blob = pair.other.key_blob(lane.remote.region)?;
    for length in 0..blob.len() {
        let import = pair.one.import_key(pair.at_one, &blob[..length]);
        let what = format!("a key blob of {} bytes cut to {length}", blob.len());
        refused(&what, import, &[ErrorKind::Peer])?;
    }
    let mut longer = blob;
    longer.push(0);
    let import = pair.one.import_key(pair.at_one, &longer);
    refused("a key blob with a byte too many", import, &[ErrorKind::Peer])?;
    works(world, &mut lane)
}

fn garbled(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let blob = pair.other.key_blob(lane.remote.region)?;
    let bits = blob.len() * 8;
    for at in 0..bits.min(1024) {
        // All bits of a short blob, some of a long one.
        let bit = if bits <= 1024 {
            at
        } else {
            usize::try_from(world.dice().below(bits as u64)).unwrap_or(0)
        };
        let mut flipped = blob.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        match pair.one.import_key(pair.at_one, &flipped) {
            Ok(key) => pair.one.release_key(pair.at_one, key)?,
            import => {
                refused(&format!("a key blob with bit {bit} flipped"), import, &[ErrorKind::Peer])?;
            }
        }
    }
    works(world, &mut lane)
}

fn foreign(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let length = pair.other.key_blob(lane.remote.region)?.len();
    let most = kvx_core::memory::KeyBlob::MAX_BYTES;
    let mut strangers = vec![
        vec![],
        vec![0],
        vec![0; length],
        vec![0xff; length],
        vec![0; most],
        b"{\"rkey\": 4711, \"address\": 140737488355328}".to_vec(),
    ];
    strangers.extend((0..32).map(|_| world.dice().bytes(length)));
    strangers.push(world.dice().bytes(most));
    for stranger in strangers {
        let import = pair.one.import_key(pair.at_one, &stranger);
        let what = format!("{} bytes that are no key blob", stranger.len());
        refused(&what, import, &[ErrorKind::Peer])?;
    }
    works(world, &mut lane)
}

fn other_incarnation(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let mut lanes = [world.lane(&first, 128)?, world.lane(&second, 128)?];
    let blob = second.other.key_blob(lanes[1].remote.region)?;
    let import = first.one.import_key(first.at_one, &blob);
    refused("a key blob of another peer", import, &[ErrorKind::Peer])?;
    lanes.iter_mut().try_for_each(|lane| works(world, lane))
}

fn released(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let blob = pair.other.key_blob(lane.remote.region)?;
    let released = pair.one.import_key(pair.at_one, &blob)?;
    ensure!(released != lane.key, "two imports of a blob have one handle");
    pair.one.release_key(pair.at_one, released)?;
    let again = pair.one.release_key(pair.at_one, released);
    refused("releasing a key twice", again, &[ErrorKind::Misuse])?;
    for mode in modes(&lane)? {
        let mut segment = lane.segment(0, 0, 16);
        segment.remote = released;
        let post = pair.one.submit(world.id(), pair.at_one, mode, &[segment], None);
        refused(&format!("a {mode} by a released key"), post, &[ErrorKind::Misuse])?;
    }
    world.settle_down(&[&pair.one, &pair.other])?;
    works(world, &mut lane)
}

fn unknown(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let blob = pair.other.key_blob(lane.remote.region)?;
    let (key, peer, misuse) =
        (RemoteRegionId::new(44, 4), PeerId::new(77, 7), &[ErrorKind::Misuse]);
    refused("releasing an unknown key", pair.one.release_key(pair.at_one, key), misuse)?;
    refused("releasing a key of an unknown peer", pair.one.release_key(peer, lane.key), misuse)?;
    refused("importing a key of an unknown peer", pair.one.import_key(peer, &blob), misuse)?;
    works(world, &mut lane)
}

fn forgotten_with_peer(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 128)?;
    pair.one.sever(pair.at_one)?;
    world.severed(&pair.one, pair.at_one)?;
    if pair.other.down(pair.at_other).is_none() {
        pair.other.sever(pair.at_other)?;
        world.severed(&pair.other, pair.at_other)?;
    }
    let again = world.meet(&pair.one, &pair.other)?;
    for mode in modes(&lane)? {
        let segments = [lane.segment(0, 0, 16)];
        let post = again.one.submit(world.id(), again.at_one, mode, &segments, None);
        let what = format!("a {mode} by a key of the connection before this one");
        refused(&what, post, &[ErrorKind::Misuse])?;
    }
    world.settle_down(&[&again.one, &again.other])?;
    lane.check("after keys of an earlier connection were used")
}

fn after_deregister(world: &World) -> Verdict {
    let pair = world.pair()?;
    for mode in modes(&world.lane(&pair, 16)?)? {
        let lane = world.lane(&pair, 128)?;
        pair.other.deregister(lane.remote.region)?;
        // Whatever takes the place of the region: other bytes of the same size.
        let next = world.memory(&pair.other, 128)?;
        let fresh = world.memory(&pair.one, 128)?;
        let segment =
            kvx_core::transfer::PostedSegment { local: fresh.region, ..lane.segment(0, 0, 32) };
        let id = world.id();
        match pair.one.submit(id, pair.at_one, mode, &[segment], None) {
            Ok(posted) => {
                ensure!(posted, "an empty queue is full");
                let both = [&pair.one, &pair.other];
                let settled = || Ok(pair.one.settled(id).is_some());
                world.wait(
                    &both,
                    "a transfer by the key of a deregistered region to settle",
                    settled,
                )?;
            }
            post => {
                refused(
                    "a transfer by the key of a deregistered region",
                    post,
                    &[ErrorKind::Peer],
                )?;
            }
        }
        world.settle_down(&[&pair.one, &pair.other])?;
        next.check("after a transfer by the key of the region before it")?;
        let stolen = fresh.read(0, 32)? == next.expected(0, 32);
        ensure!(!stolen, "the key of a deregistered region read the region after it");
        if pair.one.down(pair.at_one).is_some() {
            // A fabric may end the connection on such an access.
            return Ok(());
        }
    }
    Ok(())
}
