//! Giving engines up.

use std::sync::Arc;

use kvx_core::card::EngineName;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind};

use super::site::SiteNo;
use super::{GoneReason, Message, Peers, SessionId};

impl Peers {
    /// Gives up everything that has to do with an engine, or with all.
    pub(super) fn forget(&mut self, engine: Option<&EngineName>) {
        let meant = |name: &EngineName| engine.is_none_or(|engine| engine == name);
        let sites: Vec<SiteNo> = self
            .sites
            .iter()
            .filter(|(_, site)| meant(&site.key.engine))
            .map(|(no, _)| *no)
            .collect();
        let error = Error::new(ErrorKind::Closed, "peers", "the engine is forgotten on this side");
        let error = Arc::new(error);
        for no in sites {
            let waiters = self.sites.get(&no).map(|site| site.waiters.clone());
            for id in waiters.into_iter().flatten() {
                self.fail_want(id, Arc::clone(&error));
            }
            self.remove_site(no);
        }
        let peers = self.peers.iter().filter(|(_, peer)| meant(&peer.remote.engine));
        let peers: Vec<Incarnation> = peers.map(|(incarnation, _)| *incarnation).collect();
        peers.into_iter().for_each(|incarnation| self.gone(incarnation, GoneReason::Forgotten));
        let sessions = self.sessions.iter().filter(|(_, session)| meant(&session.remote.engine));
        let sessions: Vec<SessionId> = sessions.map(|(id, _)| *id).collect();
        for session in sessions {
            self.send(session, &Message::Bye);
            self.close(session);
        }
        if engine.is_none() {
            self.superseded.clear();
        }
    }
}
