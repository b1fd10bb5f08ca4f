//! What must hold of a machine after each step, whatever has happened.

use crate::protocol::peers::Peers;
use crate::protocol::peers::peer::Attempt;
use crate::protocol::peers::site::Fetch;

pub(super) fn check(peers: &Peers) {
    let young_sites = peers.sites.values().filter(|site| match &site.fetch {
        Fetch::Running(run) => run.young.is_some(),
        _ => false,
    });
    let young_peers = peers.peers.values().filter(|peer| match &peer.attempt {
        Attempt::Running(run) => run.young.is_some(),
        _ => false,
    });
    let young = young_sites.count() + young_peers.count();
    assert_eq!(peers.young, young, "attempts that are young are counted");
    for (life, peer) in &peers.peers {
        let steps = peers.steps.values().filter(|step| step.peer == *life).count();
        let meets = match &peer.attempt {
            Attempt::Running(run) => usize::from(run.phase.step().is_some()),
            _ => 0,
        };
        let answers = usize::from(peer.answer.step().is_some());
        let known = meets + answers + peer.orphans as usize;
        assert_eq!(steps, known, "more than one attempt with {} at a time", peer.remote);
        if let Some(connection) = peer.link.connection() {
            assert_eq!(peers.connections.get(&connection), Some(life), "a link is a peer's");
        }
        assert_eq!(
            peers.answering.contains(life),
            peer.answer.is_under_way(),
            "answers under way are counted"
        );
    }
    for (connection, life) in &peers.connections {
        let link = peers.peers.get(life).and_then(|peer| peer.link.connection());
        assert_eq!(link, Some(*connection), "a connection is the peer's that it leads to");
        assert!(!peers.ending.contains_key(connection), "what ends is nobody's");
    }
}
